"""Checks a compatible pack on the machine that is about to use it, once."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autosel.core import CanonicalExperts, Device
from autosel.layer_choice import Prove
from autosel.packs import canary, canary_results
from autosel.tiers import Answer, Tiers


def prover(
    load: Callable[[], CanonicalExperts],
    device: Device,
    expert_map: torch.Tensor | None,
    *,
    leads: bool = False,
) -> Prove | None:
    """What :class:`~autosel.layer_choice.Chooser` calls for a compatible answer.

    load        the layer's weights on the device
    expert_map  int32 ``[num_experts]`` on the device, or None where every expert is here

    leads       only this rank asks, and the others do as it says (:mod:`autosel.ranks`)

    None inside a process group of several ranks: ranks that timed for themselves could disagree.
    There a pack counts only where the check has passed before (``autosel pack check``).
    """
    if _several_ranks() and not leads:
        return None

    def prove(tiers: Tiers, answer: Answer) -> None:
        assert answer.entry is not None, "only packs are graded"
        key = (tiers.store.path, answer.origin.sha256, answer.entry, device)
        # A check that failed is not repeated at each start; `autosel pack check --again` does.
        if canary_results.find(*key) is None:
            result = canary.run(answer.entry, load(), device, expert_map=expert_map)
            canary_results.keep(*key, result)

    return prove


def _several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1
