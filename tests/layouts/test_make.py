"""The round trip that the layouts' tests share sees planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel.core import CanonicalExperts, Problem
from autosel.interfaces import PackedExperts
from autosel.layouts.nfirst_bytes import NFirstBytes
from tests.layouts import make


class TouchesTheExperts(NFirstBytes):
    def pack(self, experts: CanonicalExperts) -> PackedExperts:
        packed = super().pack(experts)
        experts.w2.scales[0, 0, 0] += 1
        return packed


class LosesABit(NFirstBytes):
    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        found = super().unpack(packed)
        found.w13.codes[1, 2, 3] ^= 1 << 7
        return found


class ChangesADtype(NFirstBytes):
    def unpack(self, packed: PackedExperts) -> CanonicalExperts:
        found = super().unpack(packed)
        return replace(found, w2=replace(found.w2, scales=found.w2.scales.float()))


class ForetellsAnotherSize(NFirstBytes):
    def nbytes(self, problem: Problem) -> int:
        return super().nbytes(problem) + 1


FAULTY = (TouchesTheExperts, LosesABit, ChangesADtype, ForetellsAnotherSize)


@pytest.mark.parametrize("faulty", FAULTY)
def test_faults_are_seen(faulty: type[NFirstBytes]) -> None:
    experts = make.experts(make.problem())
    make.assert_round_trip(NFirstBytes(), experts)
    with pytest.raises(AssertionError):
        make.assert_round_trip(faulty(), experts)
