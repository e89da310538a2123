"""What serves a layer that is not tuned: the built-in order of backends that need no package."""

from __future__ import annotations

from collections.abc import Collection

from autosel import registry
from autosel.core import Candidate, Device, Problem

#: Backends that need no other package, the fastest first: the first that supports the layer here
#: serves what is not tuned. The last one supports every layer on every device.
DEFAULTS = ("cpu_native", "wna16_tiled", "triton", "emulation")


def fallback(
    problem: Problem, device: Device, num_tokens: int = 1, *, failed: Collection[str] = ()
) -> Candidate:
    """The first default that supports the layer on ``device`` and is not among ``failed`` names.

    Support rules alone decide, so this is right for a device that is not here. The last default is
    the answer where none other is left.
    """
    for name in DEFAULTS:
        backend = registry.get(name)
        if name not in failed and backend.supports(problem, device):
            return Candidate.of(name, backend.space(problem, num_tokens, device).default)
    return Candidate(DEFAULTS[-1])
