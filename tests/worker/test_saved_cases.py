"""When a worker leaves its judged inputs to the next one."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autosel import worker_child
from autosel.routing_synthetic import make_routing
from autosel.sources import RandomSource
from autosel.tune_inputs import judged_inputs
from tests.fakes import CPU, PROBLEM


def server(file: io.BytesIO) -> Any:
    made = object.__new__(worker_child._Server)
    made._cases, made._setup = file, SimpleNamespace(cases_saved=True, device=CPU)
    return made


@pytest.fixture(scope="module")
def inputs():
    make_routing("uniform", 1, PROBLEM)
    return judged_inputs(RandomSource(PROBLEM).load(), "uniform", [4])


@pytest.mark.parametrize("bytes_per_s", [0.0, 1e30])
def test_right_results_are_left_to_the_next_worker_where_writing_is_quicker(
    inputs, bytes_per_s, monkeypatch
) -> None:
    monkeypatch.setattr(worker_child, "SAVED_PER_S", bytes_per_s)
    file, calls = io.BytesIO(), []

    def make():
        calls.append(1)
        return inputs

    assert server(file)._judged(make) is inputs
    again = server(file)._judged(make)
    saved = bytes_per_s > 0
    assert (bool(file.getvalue()), len(calls)) == (saved, 1 if saved else 2)
    assert again[0].keys() == inputs[0].keys()
    found, expected = again[0][4].judged, inputs[0][4].judged
    assert torch.equal(found.reference, expected.reference)
    assert all(torch.equal(found.scales[name], expected.scales[name]) for name in expected.scales)
