"""torch's float32 settings: exact inside, and exactly as they were afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from autosel import float32
from autosel.process_state import ProcessState
from autosel.reference import exact_arithmetic

BACKENDS: Any = torch.backends
CPU = torch.device("cpu")
needs_tree = pytest.mark.skipif(
    not hasattr(BACKENDS, "fp32_precision"), reason="this torch has only the old interface"
)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before = float32.settings()
    yield
    float32.put(before)


def word() -> str:
    return torch.get_float32_matmul_precision()


def all_of_it(value: str) -> None:
    BACKENDS.fp32_precision = value


def cuda_products(value: str) -> None:
    BACKENDS.cuda.matmul.fp32_precision = value


def cudnn(value: str) -> None:
    BACKENDS.cudnn.fp32_precision = value


def cpu_products(value: str) -> None:
    BACKENDS.mkldnn.matmul.fp32_precision = value


def word_and_cuda(old: str, new: str) -> None:
    torch.set_float32_matmul_precision(old)
    cuda_products(new)


def exact_now() -> bool:
    products = (BACKENDS.cuda.matmul.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision)
    return word() == "highest" and set(products) <= {"none", "ieee"}


NEW: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "cuda tf32": lambda: cuda_products("tf32"),
    "cpu bf16": lambda: cpu_products("bf16"),
    "cpu tf32": lambda: cpu_products("tf32"),
    "all tf32": lambda: all_of_it("tf32"),
    "all bf16": lambda: all_of_it("bf16"),
    "all ieee": lambda: all_of_it("ieee"),
    "cudnn tf32": lambda: cudnn("tf32"),
    "cudnn ieee, all tf32": lambda: (cudnn("ieee"), all_of_it("tf32")),
    "all and cuda tf32": lambda: (all_of_it("tf32"), cuda_products("tf32")),
    "all tf32, cuda ieee": lambda: (all_of_it("tf32"), cuda_products("ieee")),
    "old high": lambda: torch.set_float32_matmul_precision("high"),
    "old medium": lambda: torch.set_float32_matmul_precision("medium"),
    "old high, new none": lambda: word_and_cuda("high", "none"),
    "old high, new ieee": lambda: word_and_cuda("high", "ieee"),
}


@needs_tree
@pytest.mark.parametrize("name", NEW)
def test_either_interface_is_exact_inside_and_as_it_was_afterwards(name: str) -> None:
    NEW[name]()
    before = float32.settings()
    with exact_arithmetic(CPU):
        assert exact_now()
        with exact_arithmetic(CPU):  # nested
            assert float32.settings() == before
        assert exact_now()
    assert float32.settings() == before
    # Looking and switching has pinned nothing: what was taken over from above still is.
    for value in ("tf32", "none"):
        all_of_it(value)
        expected = {**before, "generic.all": value}
        assert float32.settings() == expected


@needs_tree
def test_a_place_that_was_never_set_still_follows_what_stands_above() -> None:
    with exact_arithmetic(CPU):
        pass
    all_of_it("tf32")
    assert BACKENDS.cuda.matmul.fp32_precision == "tf32"
    assert BACKENDS.mkldnn.matmul.fp32_precision == "tf32"
    conv = BACKENDS.cudnn.conv.fp32_precision
    float32.put(float32.settings())
    assert BACKENDS.cudnn.conv.fp32_precision == conv


def _in_threads(number: int, work: Callable[[int], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            work(place)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


def test_of_several_threads_the_first_saves_and_the_last_puts_back() -> None:
    torch.set_float32_matmul_precision("high")
    before = float32.settings()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def work(place: int) -> None:
        if place == 0:
            with exact_arithmetic(CPU):
                first_in.set()
                assert second_in.wait(30)
            first_out.set()
        else:
            assert first_in.wait(30)
            with exact_arithmetic(CPU):
                second_in.set()
                assert first_out.wait(30)
                assert word() == "highest"  # the first has left, the second is still inside

    assert not _in_threads(2, work)
    assert word() == "high"
    assert float32.settings() == before


def test_many_threads_leave_the_settings_as_they_were() -> None:
    torch.set_float32_matmul_precision("medium")
    before = float32.settings()

    def work(place: int) -> None:
        for _ in range(200):
            with exact_arithmetic(CPU):
                assert word() == "highest"

    assert not _in_threads(4, work)
    assert float32.settings() == before


def test_what_somebody_sets_in_the_meantime_stays() -> None:
    torch.set_float32_matmul_precision("high")
    with exact_arithmetic(CPU):
        torch.set_float32_matmul_precision("medium")
    assert word() == "medium"


def test_older_torch_has_only_the_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ABOVE", "_PRODUCTS", "_OTHERS"):
        monkeypatch.setattr(float32, name, ())
    monkeypatch.setattr(float32, "_EXACT", {float32.WORD: "highest"})
    torch.set_float32_matmul_precision("high")
    with exact_arithmetic(CPU):
        assert word() == "highest"
        assert float32.settings() == {"word": "high"}
    assert word() == "high"
    float32.put({"word": "medium"})
    assert word() == "medium"


@needs_tree
@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("name", NEW)
def test_a_candidate_that_mixes_the_interfaces_is_undone(name: str, everything: bool) -> None:
    state = ProcessState.now()
    before = float32.settings()
    NEW[name]()
    is_new = float32.settings() != before
    assert state.put_back(all_settings=everything) == (("float32 precision",) if is_new else ())
    assert float32.settings() == before
    assert word() == before["word"]


@needs_tree
def test_settings_of_the_new_interface_reach_another_process() -> None:
    all_of_it("tf32")
    wanted, state = float32.settings(), ProcessState.now(to_send=True)
    all_of_it("none")
    state.put_back()
    assert float32.settings() == wanted


@needs_tree
def test_putting_back_keeps_products_exact_for_whoever_is_inside() -> None:
    state = ProcessState.now()
    with exact_arithmetic(CPU):
        all_of_it("tf32")
        state.put_back()
        assert exact_now()


def test_a_setting_that_cannot_be_read_any_more_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    state = ProcessState.now()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "working folder" in state.put_back()
