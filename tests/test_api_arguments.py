"""The Python API's arguments: devices by name, one token count or several; one line for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import autosel
from autosel.core import Problem, QuantScheme
from autosel.device import detect
from autosel.errors import AutoselError
from autosel.sources import RandomSource
from autosel.timing import TimingSettings
from autosel.tune_types import SweepSettings
from tests.fakes import judge_one_case, prove_quickly
from tests.threads import one_thread

SCHEME = QuantScheme(4, 32, True)
SOURCE = RandomSource(Problem(4, 4, 2, 64, 32, SCHEME, SCHEME))
HERE = SweepSettings(
    timing=TimingSettings(rounds=2, samples_per_round=2, limit_s=0.05), isolate=False, trials=1
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one decision, swept with one number instead of a list."""
    path = tmp_path_factory.mktemp("api") / "a.db"
    with pytest.MonkeyPatch.context() as patch, one_thread():
        judge_one_case(patch)
        prove_quickly(patch)
        found = autosel.sweep(
            SOURCE, tokens=2, backends=["emulation"], db=path, settings=HERE, device="cpu"
        )
    assert [d.bucket.measured for d in found.decisions] == [2]
    return path


@pytest.mark.parametrize("tokens", [0, -1, 1.5, "x", None, True, [1], torch.tensor([1, 2])])
@pytest.mark.parametrize("empty", [True, False])
def test_token_counts_that_are_none(
    tokens: Any, empty: bool, decided: Path, tmp_path: Path
) -> None:
    """Refused alike whether anything is stored or not."""
    db = tmp_path / "none.db" if empty else decided
    with pytest.raises(
        AutoselError, match=r"tokens: value: found .*, expected a whole number"
    ) as e:
        autosel.explain(SOURCE, tokens=tokens, db=db)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("tokens", ["16", b"16", 0, [0], [1, -3], ["16"], 1.5, [True]])
def test_sweeps_of_token_counts_that_are_none(tokens: Any) -> None:
    with pytest.raises(AutoselError, match="tokens: value: found"):
        autosel.sweep(SOURCE, tokens=tokens, db=":memory:", settings=HERE)


def test_one_layer_is_explained_by_any_whole_number(decided: Path) -> None:
    for tokens in (2, np.int64(2), 10**30):
        assert autosel.explain(SOURCE, tokens=tokens, db=decided).status == "tuned"


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None, "detected"])
def test_devices_by_name_and_as_they_are(device: Any, decided: Path) -> None:
    given = detect("cpu") if device == "detected" else device
    assert autosel.explain(SOURCE, tokens=2, device=given, db=decided).status == "tuned"
    other = replace(detect("cpu"), name="another machine")
    assert autosel.explain(SOURCE, tokens=2, device=other, db=decided).status == "not tuned"


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "x y", 1.5, []])
def test_devices_that_are_none(device: Any, decided: Path) -> None:
    for call in (autosel.explain, autosel.report):
        options: dict[str, Any] = {} if call is autosel.explain else {"path": "never.html"}
        with pytest.raises(AutoselError) as said:
            call(SOURCE, tokens=2, device=device, db=decided, **options)
        assert "\n" not in str(said.value)


@pytest.mark.parametrize("target", [None, 5, ["a"], b"mixtral-8x7b"])
def test_targets_that_are_none(target: Any) -> None:
    for call in (
        lambda: autosel.explain(target, tokens=1, db=":memory:"),
        lambda: autosel.sweep(target, tokens=[1], db=":memory:"),
        lambda: autosel.plan(target, db=":memory:"),
        lambda: autosel.source(target),
    ):
        with pytest.raises(AutoselError, match="source: target: found"):
            call()


def test_reports_and_plots_of_token_counts_that_are_none(decided: Path, tmp_path: Path) -> None:
    with pytest.raises(AutoselError, match="tokens: value"):
        autosel.report(SOURCE, tmp_path / "a.html", tokens=0, db=decided)
    with pytest.raises(AutoselError, match="tokens: value"):
        autosel.plot(SOURCE, tmp_path / "a.png", kind="bytes", tokens=0, db=decided)
