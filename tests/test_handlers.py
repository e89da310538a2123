"""What a signal handler raises goes to the caller, whoever's code was running."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autosel import handlers
from autosel.failures import call_tamed, failed, ignored, message, tamed


class RequestTimeoutError(Exception):
    pass


def function(number: int, frame: Any) -> None:
    raise RequestTimeoutError("took too long")


def exits(*given: Any) -> None:
    sys.exit(0)


def takes_itself_out(number: int, frame: Any) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    deeper()


def deeper() -> None:
    raise RequestTimeoutError("took too long")


class Holder:
    def method(self, number: int, frame: Any) -> None:
        raise RequestTimeoutError("took too long")

    def __call__(self, *given: Any) -> None:
        raise RequestTimeoutError("took too long")


def named(number: int, frame: Any, *, what: str) -> None:
    raise RequestTimeoutError(what)


HANDLERS: dict[str, Any] = {
    "function": function,
    "exits": exits,
    "takes itself out": takes_itself_out,
    "method": Holder().method,
    "object": Holder(),
    "partial": functools.partial(named, what="took too long"),
    "lambda": lambda *given: deeper(),
}
RAISED = (RequestTimeoutError, SystemExit)


@pytest.fixture(params=HANDLERS)
def alarm(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Has the handler run here and now."""
    before = signal.signal(signal.SIGALRM, HANDLERS[request.param])
    yield lambda: signal.raise_signal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_through_each_place_where_candidates_are_caught(alarm: Callable[[], None]) -> None:
    with pytest.raises(RAISED):
        call_tamed(alarm)
    signal.signal(signal.SIGALRM, function)
    with pytest.raises(RAISED), ignored():
        alarm()
    try:
        alarm()
    except RAISED as error:
        with pytest.raises(RequestTimeoutError):
            failed(error, "x run")


def test_a_message_that_takes_long_does_not_swallow_it() -> None:
    class SlowError(Exception):
        def __str__(self) -> str:
            signal.raise_signal(signal.SIGALRM)
            return "slow"

    before = signal.signal(signal.SIGALRM, function)
    try:
        for step in (message, tamed):
            with pytest.raises(RequestTimeoutError):
                step(SlowError())
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("said", [True, False], ids=["from", "while handling"])
def test_what_a_candidate_made_of_it_is_the_handlers_all_the_same(
    alarm: Callable[[], None], said: bool
) -> None:
    def wraps() -> None:
        try:
            alarm()
        except BaseException as error:
            if said:
                raise RuntimeError("the kernel did not return") from error
            raise RuntimeError("the kernel did not return")  # noqa: B904

    with pytest.raises(RAISED):
        call_tamed(wraps)


def broken() -> None:
    raise ValueError("no kernel image")


def test_a_candidates_own_exception_is_its_own(alarm: Callable[[], None]) -> None:
    """Also where the caller calls again while it handles the earlier one."""
    with ignored():
        broken()
    try:
        alarm()
    except RAISED:
        with ignored():
            broken()
        with pytest.raises(ValueError, match="no kernel image") as caught:
            call_tamed(broken)
        assert failed(caught.value, "x run") == ("failed", "x run: ValueError: no kernel image")


def test_in_a_worker_there_is_no_user(
    alarm: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_has_user", True)
    handlers.no_user()
    with ignored():
        alarm()
