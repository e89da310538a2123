"""What a signal handler raises is the program's, whoever's code was running at that moment.

Python runs a handler (an orderly shutdown, a request's time limit) between two instructions of
whatever the main thread is at. Its exception therefore comes up through a candidate's code and
says nothing about the candidate: it belongs to the caller.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import signal
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

_has_user = True


def no_user() -> None:
    """This process is a worker: the only handlers in it that raise are a candidate's."""
    global _has_user
    _has_user = False


def let_through(error: BaseException) -> None:
    """Raise what a signal handler raised, where ``error`` is that or came of it."""
    found = _of_handler(error) if _has_user else None
    if found is not None:
        raise found


def _of_handler(error: BaseException) -> BaseException | None:
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()}
    running = set(_frames_from(sys._getframe()))
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_code in codes or _called_for_signal(frame):
                return one
        waiting.append(one.__cause__)
        context = one.__context__
        begin = context.__traceback__ if context is not None else None
        # A caller may call again while it handles an earlier exception: that one is over.
        if begin is not None and begin.tb_frame not in running:
            waiting.append(context)
    return None


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _code(handler: Any) -> CodeType | None:
    """The code that a handler runs; None for the system's own ways and for what is not Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    if not hasattr(handler, "__code__"):  # an object that can be called
        handler = vars(type(handler)).get("__call__")
    found = getattr(handler, "__code__", None)
    return found if isinstance(found, CodeType) else None


def _called_for_signal(frame: FrameType) -> bool:
    """Whether ``frame`` was called as handlers are: with a signal's number and the frame below.

    Some take themselves out before they raise, so that a second signal ends the process.
    """
    names, more, _, values = inspect.getargvalues(frame)
    given = [values.get(name) for name in names]
    rest = values.get(more) if more else ()
    given += rest if isinstance(rest, tuple) else ()
    signals = signal.valid_signals()
    return any(
        not isinstance(number, bool)
        and isinstance(number, int)
        and number in signals
        and below is not None
        and below is frame.f_back
        for number, below in itertools.pairwise(given)
    )
