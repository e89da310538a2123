"""Humming's lists of configurations: computed once, shared by processes, never a wrong one."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from autosel.backends import _humming_choices, _humming_offline
from autosel.backends._humming_choices import Asked, choices
from autosel.errors import UnsupportedError
from tests.backends.adapters import H200, stand_in

#: A record of the same card as a process sees it that has opened it; release 0.1.19's names.
OPENED = {
    "index": 0,
    "name": "H200",
    "is_ppu": False,
    "sm_count": 132,
    "sm_major": 9,
    "sm_minor": 0,
    "sm_version": 90,
    "max_smem_size": 232448,
    "max_threads_per_sm": 2048,
    "max_registers_per_sm": 65536,
    "max_threads_per_block": 1024,
    "l1_cache_size": 262144,
    "l2_cache_size": 50 << 20,
    "default_smem_size": 49152,
    "sm_clock_khz": 1980000,
    "memory_bandwidth_gbps": 4916.736,
    "tensorcore_tops": {"float16": 1070.5},
}


@dataclass(frozen=True)
class Layer:
    rows: int

    def to_str(self) -> str:
        return json.dumps({"shape_n": self.rows})


W13, W2 = Asked(Layer(256), "indexed"), Asked(Layer(128), "indexed")


class Package:
    """A folder with sources, the record of a device, and heuristics that count their calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.calls: list[tuple[int, str]] = []
        self.record: Any = SimpleNamespace(**OPENED)
        self.root = folder / "site" / "humming"
        (self.root / "tune").mkdir(parents=True)
        (self.root / "tune" / "__init__.py").write_text("WAVES = 1\n")
        stand_in(monkeypatch, "humming", {"humming.device": {"DeviceInfo": lambda: self.record}})
        found = SimpleNamespace(submodule_search_locations=[str(self.root)])
        monkeypatch.setattr(sys.modules["humming"], "__spec__", found)

    def heuristics(self, layer_config: Layer, gemm_type: str, **options: bool) -> list[Any]:
        assert options == {"use_f16_accum": False, "use_batch_invariant": False}
        self.calls.append((layer_config.rows, gemm_type))
        block = (16, layer_config.rows, 64)  # a tuple, as the package's own
        return [
            [0, 8, {"block_shape": block, "use_tma": True}],
            [8, 1 << 30, {"block_shape": block}],
        ]

    def expected(self, asked: Asked) -> Any:
        made = Package.heuristics(
            SimpleNamespace(calls=[]), asked.layer, asked.kind,  # type: ignore[arg-type]
            use_f16_accum=False, use_batch_invariant=False,
        )  # fmt: skip
        return json.loads(json.dumps(made))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Package]:
    monkeypatch.setenv("AUTOSEL_CACHE", str(tmp_path / "cache"))
    _humming_choices._sources.cache_clear()
    yield Package(monkeypatch, tmp_path)
    _humming_choices._sources.cache_clear()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.json"))


def test_computed_once_and_the_same_from_the_file(package: Package, tmp_path: Path) -> None:
    for _ in range(3):
        for asked in (W13, W2, replace(W13, kind="grouped_masked")):
            assert choices(package.heuristics, asked) == package.expected(asked)
    assert package.calls == [(256, "indexed"), (128, "indexed"), (256, "grouped_masked")]
    assert len(files(tmp_path)) == 3


def test_a_process_that_pretends_has_the_same_file_as_one_that_opened_the_device(
    package: Package, tmp_path: Path
) -> None:
    opened = choices(package.heuristics, W13)
    package.record = _humming_offline.record(H200)
    assert choices(package.heuristics, W13) == opened
    assert choices(package.heuristics, W2) == package.expected(W2)
    package.record = SimpleNamespace(**{**OPENED, "name": " H200 "})
    assert choices(package.heuristics, W2) == package.expected(W2)
    assert package.calls == [(256, "indexed"), (128, "indexed")]
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "H100"),
        ("sm_count", 66),
        ("sm_minor", 3),
        ("max_smem_size", 166912),
        ("max_threads_per_sm", 1536),
        ("max_registers_per_sm", 32768),
        ("l2_cache_size", 25 << 20),
        ("memory_bandwidth_gbps", 3350.0),
        ("tensorcore_tops", {"float16": 800.0}),
    ],
)
def test_another_device_gets_its_own_list(package: Package, name: str, value: object) -> None:
    choices(package.heuristics, W13)
    package.record = SimpleNamespace(**{**OPENED, name: value})
    choices(package.heuristics, W13)
    choices(package.heuristics, W13)
    assert len(package.calls) == 2


def test_another_package_gets_its_own_list(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices(package.heuristics, W13)
    (package.root / "tune" / "__init__.py").write_text("WAVES = 2\n")
    _humming_choices._sources.cache_clear()
    choices(package.heuristics, W13)
    assert len(package.calls) == 2
    monkeypatch.setattr(_humming_choices.metadata, "version", lambda name: "0.1.20")
    _humming_choices._sources.cache_clear()
    choices(package.heuristics, W13)
    assert len(package.calls) == 3


def test_its_own_tests_mode_is_another_list(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices(package.heuristics, W13)
    monkeypatch.setenv("HUMMING_TEST_TUNING_SOURCE", "heuristic")
    choices(package.heuristics, W13)
    assert len(package.calls) == 2


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A file whose contents were changed by somebody who knows its checksum."""

    def damage(content: bytes) -> bytes:
        data = json.loads(content)
        change(data)
        data["sha256"] = _humming_choices._sha256(data["choices"])
        return json.dumps(data).encode()

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-20],
        lambda content: b"",
        lambda content: b"\xff\xfe\x00",
        lambda content: b"[]",
        lambda content: b"[" * 100_000,
        lambda content: content.replace(b"[16, 256, 64]", b"[32, 256, 64]"),  # still JSON
        changed(lambda data: data["made_for"].update(kind="dense")),
        changed(lambda data: data["made_for"]["device"].update(sm_count=1)),
        changed(lambda data: data["choices"].clear()),
        changed(lambda data: data["choices"].reverse()),
        changed(lambda data: data["choices"].pop(0)),
        changed(lambda data: data["choices"][0].pop()),
        changed(lambda data: data["choices"][1].__setitem__(1, 8)),
        changed(lambda data: data["choices"][1].__setitem__(1, 9.5)),
        changed(lambda data: data["choices"][0][2].pop("block_shape")),
        changed(lambda data: data["choices"][0][2].update(block_shape=[16, "64", 64])),
        changed(lambda data: data["choices"][0][2].update(block_shape=[16, 0, 64])),
    ],
)
def test_a_damaged_file_is_replaced(
    package: Package, tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    choices(package.heuristics, W13)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert file.read_bytes() != whole
    assert choices(package.heuristics, W13) == package.expected(W13)
    assert len(package.calls) == 2
    assert file.read_bytes() == whole


def test_a_file_of_another_list_under_this_name_is_replaced(
    package: Package, tmp_path: Path
) -> None:
    choices(package.heuristics, W13)
    (first,) = files(tmp_path)
    choices(package.heuristics, W2)
    (second,) = (file for file in files(tmp_path) if file != first)
    second.write_bytes(first.read_bytes())
    assert choices(package.heuristics, W2) == package.expected(W2)
    assert len(package.calls) == 3


def no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOSEL_CACHE", str(tmp_path / "file" / "cache"))


def no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*args: object, **options: object) -> None:
        raise NotImplementedError("flock")

    monkeypatch.setattr(_humming_choices, "FileLock", fails)


def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(path: Path, *args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)


def no_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(sys.modules["humming.device"], "DeviceInfo")


@pytest.mark.parametrize("obstacle", [no_folder, no_locks, full, no_device])
def test_without_a_file_the_list_is_computed(
    package: Package,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    obstacle: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    obstacle(monkeypatch, tmp_path)
    for _ in range(2):
        assert choices(package.heuristics, W13, (W2,)) == package.expected(W13)
    assert package.calls == [(256, "indexed")] * 2
    assert not list((tmp_path / "cache").rglob("*.partial"))
    assert not files(tmp_path)


def test_what_the_package_raises_is_raised_and_nothing_kept(
    package: Package, tmp_path: Path
) -> None:
    def fails(**options: object) -> None:
        raise AssertionError("unsupported a_dtype")

    with pytest.raises(AssertionError, match="unsupported a_dtype"):
        choices(fails, W13)
    assert not files(tmp_path)
    assert choices(package.heuristics, W13) == package.expected(W13)  # and no lock is left held
    assert len(files(tmp_path)) == 1


def test_a_list_made_without_a_fact_that_was_asked_for_is_not_kept(
    package: Package, tmp_path: Path
) -> None:
    """A package that goes on where a fact is missing chooses otherwise than with the device."""
    package.record = _humming_offline.record(H200)

    def guesses(**options: Any) -> Any:
        getattr(package.record, "l2_cache_size", 0)
        return package.heuristics(**options)

    with pytest.raises(UnsupportedError, match="device's facts: found l2_cache_size"):
        choices(guesses, W13)
    assert not files(tmp_path)
    package.record = SimpleNamespace(**OPENED)
    choices(guesses, W13)
    assert len(files(tmp_path)) == 1


def lock_of(asked: Asked) -> FileLock:
    file = _humming_choices._file(asked)
    assert file is not None
    file.path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(file.path.with_suffix(".lock"))


def test_a_list_that_nobody_ends_is_computed_after_a_while(
    package: Package, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(_humming_choices.time, "sleep", looks.append)
    with lock_of(W13):
        assert choices(package.heuristics, W13) == package.expected(W13)
    assert package.calls == [(256, "indexed")]
    assert sum(looks) == pytest.approx(_humming_choices.WAIT_S)
    assert len(files(tmp_path)) == 1


def test_while_one_list_is_taken_others_are_computed(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the own one is there: the rest of the others is left to those who want it."""
    later = Asked(Layer(512), "indexed")
    third = Asked(Layer(768), "indexed")
    lock = lock_of(W13)
    lock.acquire()

    def heuristics(layer_config: Layer, **options: Any) -> Any:
        if layer_config == later.layer:  # meanwhile the one who was at it comes to an end
            file = _humming_choices._file(W13)
            assert file is not None
            file.write(package.expected(W13))
            lock.release()
        return package.heuristics(layer_config, **options)

    monkeypatch.setattr(_humming_choices.time, "sleep", lambda seconds: pytest.fail("it waited"))
    with lock_of(W2):  # this one is taken too
        found = choices(heuristics, W13, (W2, later, third))
    assert found == package.expected(W13)
    assert package.calls == [(512, "indexed")]


def test_what_fails_meanwhile_is_not_the_callers_failure(package: Package) -> None:
    lock = lock_of(W13)
    lock.acquire()

    def heuristics(layer_config: Layer, **options: Any) -> Any:
        if layer_config == W2.layer:
            lock.release()
            raise AssertionError("unsupported")
        return package.heuristics(layer_config, **options)

    assert choices(heuristics, W13, (W2,)) == package.expected(W13)


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_many_processes_compute_each_list_once_and_side_by_side(
    package: Package, tmp_path: Path
) -> None:
    """Six ask for the first list and then the second; each computation of one waits until the
    other has begun in another process, so that one after the other would never end."""
    began = tmp_path / "began"
    began.mkdir()

    def heuristics(layer_config: Layer, **options: Any) -> Any:
        (began / f"{layer_config.rows} {os.getpid()}").touch()
        other = W2 if layer_config == W13.layer else W13
        for _ in range(600):
            if list(began.glob(f"{other.layer.rows} *")):
                return package.heuristics(layer_config, **options)
            time.sleep(0.05)
        raise TimeoutError("the other list was not begun")

    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def ask() -> None:
        try:
            found = [choices(heuristics, W13, (W2,)), choices(heuristics, W2, (W13,))]
        except BaseException as error:
            found = [repr(error)]
        answers.put(found)

    processes = [context.Process(target=ask) for _ in range(6)]
    for process in processes:
        process.start()
    with ThreadPoolExecutor() as reader:
        found = reader.submit(lambda: [answers.get() for _ in processes]).result(timeout=120)
    for process in processes:
        process.join()
    assert found == [[package.expected(W13), package.expected(W2)]] * 6
    computed = sorted(path.name.split()[0] for path in began.iterdir())
    assert computed == ["128", "256"]
    assert len({path.name.split()[1] for path in began.iterdir()}) == 2
