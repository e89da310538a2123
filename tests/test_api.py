"""The Python API on real checkpoints, and that one key is used by all who write and read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autosel
from autosel.core import Decision
from autosel.device import detect
from autosel.errors import AutoselError, CheckpointError, ConfigError, UnsupportedError
from autosel.sources import CheckpointSource, RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune_types import SweepSettings
from tests.fakes import judge_one_case, prove_quickly
from tests.threads import one_thread

EXAMPLE = "ct-w4-g128-sym-mixtral"
SHORT = SweepSettings(timing=TimingSettings(rounds=2, samples_per_round=2, limit_s=0.05))
#: In this process: one of its own takes seconds to start.
HERE = replace(SHORT, isolate=False)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices: a second thread only waits, for milliseconds when the machine is busy."""
    with one_thread():
        yield


@pytest.fixture
def example(carried_dir: Path) -> str:
    return str(carried_dir / "checkpoints" / EXAMPLE)


def test_from_a_checkpoint_to_a_decision_an_explanation_and_a_plot(
    example: str, tmp_path: Path
) -> None:
    db = tmp_path / "a.db"
    result = autosel.sweep(example, tokens=[1, 16], db=db, settings=SHORT)
    assert [d.bucket.measured for d in result.decisions] == [1, 16]
    assert {m.num_tokens for m in result.measurements} == {1, 16}
    assert result.ceilings is not None
    assert EXAMPLE in result.label
    decision = result.decision(tokens=16)
    timed = {m.candidate: m for m in result.measurements if m.num_tokens == 16 and m.times_us}
    assert decision.winner in timed
    assert len(timed) >= 2, "torch alone gives several candidates"
    listed = {decision.winner} | {r.candidate for r in decision.rejected}
    assert {m.candidate for m in result.measurements if m.num_tokens == 16} == listed
    for m in timed.values():
        facts = dict(m.timing)
        assert facts["cache"] == "cold"
        assert facts["threads"] == torch.get_num_threads()
        assert int(str(facts["flush_bytes"])) > (detect("cpu").cache_bytes or 0)

    why = autosel.explain(example, tokens=16, db=db)
    assert why.decision is not None
    assert why.decision.winner == decision.winner
    json.dumps(why.to_dict(), allow_nan=False)
    file = autosel.plot(example, tmp_path / "latency.png", db=db)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_every_checkpoint_and_split_is_found_under_the_key_it_was_stored_with(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every format, both widths, a split of two: what a sweep stores, a look-up hits."""
    judge_one_case(monkeypatch)  # the sweeps of this file's other tests judge by all
    prove_quickly(monkeypatch)
    layer = checkpoint.moe_layers[0]
    once = replace(HERE, trials=1)
    with Store.open(tmp_path / "a.db") as db:
        for split in ({}, {"tp_size": 2, "tp_rank": 1}):
            options = {"layer": layer, "db": db, **split}
            result = autosel.sweep(
                str(checkpoint.path), tokens=[2], backends=["emulation"], settings=once, **options
            )
            emulation = [m for m in result.measurements if m.candidate.backend == "emulation"]
            assert emulation
            assert {m.status for m in emulation} == {"ok"}, [m.reason for m in emulation]
            why = autosel.explain(str(checkpoint.path), tokens=2, **options)
            assert why.status == "tuned", why.why
            assert why.decision is not None
            assert why.decision.winner == result.decision(2).winner
        assert len(db.entries()) == 2, "the split layer is another layer"


def test_a_preset_is_tuned_with_made_up_weights(tmp_path: Path) -> None:
    shape = {"experts": 4, "tp": 8, "act_dtype": "float16", "num_bits": 8, "group_size": -1}
    result = autosel.sweep(
        "Granite-3-1B-A400M", tokens=[1], backends=["emulation"], db=tmp_path / "a.db",
        settings=HERE, **shape,
    )  # fmt: skip
    assert result.problem.intermediate_size == 64
    assert result.problem.w13.num_bits == 8
    assert isinstance(result.decision(1), Decision)
    why = autosel.explain("granite-3-1b-a400m", tokens=1, db=tmp_path / "a.db", **shape)
    assert why.status == "tuned"
    other = autosel.explain("granite-3-1b-a400m", tokens=1, db=tmp_path / "a.db", experts=4)
    assert other.status == "not tuned"


def test_sources_of_every_kind(example: str) -> None:
    assert autosel.source(example) == CheckpointSource(example, 0)
    assert autosel.source(Path(example), tp_size=2) == CheckpointSource(example, 0, tp_size=2)
    made = autosel.source("olmoe-1b-7b", experts=2, seed=3)
    assert isinstance(made, RandomSource)
    assert made.seed == 3
    assert made.problem.num_experts == 2
    assert autosel.source(made) is made


def test_bad_targets_are_one_clear_line(example: str, tmp_path: Path) -> None:
    for error, call in (
        (ConfigError, lambda: autosel.source("qwen3-30b")),
        (CheckpointError, lambda: autosel.source(tmp_path / "nowhere")),
        (CheckpointError, lambda: autosel.sweep(example, layer=3, db=":memory:")),
        (UnsupportedError, lambda: autosel.sweep(example, tp_size=3, db=":memory:")),
        (AutoselError, lambda: autosel.open_checkpoint(tmp_path)),
        (AutoselError, lambda: autosel.sweep(example, backends=["marlinn"], db=":memory:")),
        (AutoselError, lambda: autosel.sweep(example, routing="even", db=":memory:")),
        (AutoselError, lambda: autosel.plot(example, tmp_path / "a.png", db=":memory:")),
        (AutoselError, lambda: autosel.plot(example, tmp_path / "a.gif", db=":memory:")),
    ):
        with pytest.raises(error) as caught:
            call()
        text = str(caught.value)
        assert text
        assert "\n" not in text
    with pytest.raises(ConfigError, match="qwen3-30b-a3b"):
        autosel.source("qwen3-30b")


def test_a_damaged_shard_stores_no_measurement(example: str, tmp_path: Path) -> None:
    """Damage in the weights' bytes that the headers do not show: a scale that is not a number."""
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(example, folder)
    shard = folder / "model.safetensors"
    blob = bytearray(shard.read_bytes())
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    name = next(n for n in header if "experts.1" in n and n.endswith("weight_scale"))
    start = 8 + length + header[name]["data_offsets"][0]
    blob[start : start + 2] = b"\xc0\x7f"  # a bfloat16 NaN, low byte first
    shard.write_bytes(bytes(blob))
    with Store.open(tmp_path / "a.db") as db:
        with pytest.raises(CheckpointError) as error:
            autosel.sweep(folder, tokens=[1], db=db, settings=HERE)
        assert name.rpartition(".")[0] in str(error.value)
        assert db.measurements() == []


def test_importing_the_package_stays_light() -> None:
    code = (
        "import sys, autosel\n"
        "assert autosel.__version__\n"
        "assert 'sweep' in dir(autosel)\n"
        "heavy = {'torch', 'triton', 'optuna', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "autosel.sweep, autosel.explain\n"
        # sqlite_utils imports pandas where it is installed.
        "heavy = {'triton', 'optuna', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert callable(autosel.explain) and callable(autosel.plot)\n"
        "assert not hasattr(autosel, 'nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
