"""The comparison that the adapters' tests share sees planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autosel.backends.emulation import Emulation
from tests.backends import adapters
from tests.layouts import make


class Faulty(Emulation):
    """The emulation with a fault in its output: a callable that changes it in place."""

    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def run(self, *args: Any) -> torch.Tensor:
        out = super().run(*args)
        self.fault(out)
        return out


FAULTS = {
    "one token scaled": lambda out: out[1].mul_(1.1),
    "outputs in another order": lambda out: out.copy_(out.flip(1)),
    "a value never written": lambda out: out[0, 0].fill_(float("nan")),
}


def test_a_right_output_passes() -> None:
    adapters.check(Emulation(), make.problem(128, 64))
    adapters.check_slots_served_elsewhere(Emulation())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_output_is_seen(fault: str) -> None:
    with pytest.raises(AssertionError):
        adapters.check(Faulty(FAULTS[fault]), make.problem(128, 64))


def test_a_token_that_no_expert_serves_must_be_zero() -> None:
    with pytest.raises(AssertionError):
        adapters.check_slots_served_elsewhere(Faulty(lambda out: out[1, 3].fill_(1e-6)))
