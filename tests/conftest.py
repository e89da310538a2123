"""Fixtures shared by all tests: the real checkpoints and what a correct reader gets from them.

The folder of checkpoints is AUTOSEL_FIXTURES if set, else ``shared/fixtures`` beside the clone
(the full set, where a developer keeps it), else the subset carried in ``tests/fixtures``. It
holds ``checkpoints/manifest.json`` and one folder a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal

# A shell starts background jobs with interrupts ignored, and children inherit that: tests that
# interrupt their children would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread a process, here and in the processes that tests start: the tensors are tiny, and tests
# run side by side. With two threads a test on a busy two-core machine took up to 25 times longer,
# all of it in OpenMP barriers. Tests of threading ask for more themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Threads of the tests that do ask for more sleep at a barrier: spinning there, two processes on two
# cores take the processor from those they wait for (five times the time of a file of such tests).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from safetensors import safe_open
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
CARRIED = HERE / "fixtures"

# Timing of single examples says nothing on a shared machine, and random seeds that change from
# run to run make a red build impossible to reproduce.
settings.register_profile("autosel", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("autosel")


def _find_fixtures() -> Path:
    override = os.environ.get("AUTOSEL_FIXTURES")
    beside = HERE.parent.parent / "shared" / "fixtures"
    for folder in (Path(override) if override else None, beside, CARRIED):
        if folder is not None and (folder / "checkpoints" / "manifest.json").is_file():
            return folder
    raise FileNotFoundError("no checkpoints/manifest.json in the fixture folders")


FIXTURES = _find_fixtures()
MANIFEST: list[dict[str, Any]] = json.loads(
    (FIXTURES / "checkpoints" / "manifest.json").read_text(encoding="utf-8")
)


@dataclass(frozen=True)
class CheckpointFixture:
    """One real checkpoint: its folder, its line of the manifest and its expected tensors."""

    path: Path
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    @property
    def moe_layers(self) -> list[int]:
        return list(self.facts["moe_layers"])

    @cached_property
    def expected(self) -> dict[str, torch.Tensor]:
        """Names such as ``layers.L.experts.E.gate``, ``layers.L.output``."""
        return load_file(self.path / "expected" / "expected.safetensors")

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the checkpoint itself, as stored."""
        found: dict[str, torch.Tensor] = {}
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as handle:
                found.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
        return found


ALL_CHECKPOINTS = [
    CheckpointFixture(FIXTURES / "checkpoints" / entry["name"], entry) for entry in MANIFEST
]


def named_checkpoint(name: str) -> CheckpointFixture:
    """The checkpoint of that folder name; only names of the carried subset are always there."""
    return next(item for item in ALL_CHECKPOINTS if item.name == name)


def pytest_collection_finish() -> None:
    """Thousands of collected tests are live for the whole run: a sweep, which collects garbage
    whenever it gives memory back, would look at each of them every time (0.2 s)."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nothing_built_in() -> Iterator[None]:
    """Results that ship answer, or are named as the nearest, on some machines: no test rests on
    them but those about them."""
    from autosel.packs import places

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "built_in", lambda: ())
        yield


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """The folder that holds ``checkpoints/``."""
    return FIXTURES


@pytest.fixture(scope="session")
def carried_dir() -> Path:
    """The subset that travels with the clone: a test may rely on each of its names."""
    return CARRIED


@pytest.fixture(scope="session", params=ALL_CHECKPOINTS, ids=[c.name for c in ALL_CHECKPOINTS])
def checkpoint(request: pytest.FixtureRequest) -> CheckpointFixture:
    """Every real checkpoint in turn."""
    found: CheckpointFixture = request.param
    return found


@pytest.fixture(scope="session")
def get_checkpoint() -> Any:
    """``get_checkpoint(name)`` gives one real checkpoint by its folder name."""
    return named_checkpoint
