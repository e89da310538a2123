"""A few bytes of memory that a worker and its parent share: who is being called right now.

While candidates are timed nothing may be sent: a message would wake the parent and take a
processor away from the measurement. A number in shared memory costs nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from autosel.core import Scalar
from autosel.failures import is_poison, message
from autosel.timing import Call, Prepared, Sample, Timer, TimingSettings

K = TypeVar("K", bound=Hashable)

_LAYOUT = struct.Struct("qq")  # times it changed, number of the candidate
NOBODY = -1


class Beat:
    """The shared numbers; made by the parent, opened by the worker through ``fileno``."""

    def __init__(self, fileno: int | None = None) -> None:
        if fileno is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(mmap.PAGESIZE)
                self.fileno = os.dup(file.fileno())
        else:
            self.fileno = fileno
        self._memory = mmap.mmap(self.fileno, mmap.PAGESIZE)

    def write(self, candidate: int) -> None:
        count, _ = _LAYOUT.unpack_from(self._memory)
        _LAYOUT.pack_into(self._memory, 0, count + 1, candidate)

    def read(self) -> tuple[int, int]:
        """(changes so far, number of the candidate)."""
        count, candidate = _LAYOUT.unpack_from(self._memory)
        return count, candidate

    def close(self) -> None:
        self._memory.close()
        os.close(self.fileno)


class WatchedTimer(Generic[K]):
    """A :class:`~autosel.timing.Timer` that says whose call comes next, outside what is timed.

    ``owners`` knows whose each call is; ``before`` is told. Calls are known by identity, so that
    one that timing has let go of is not kept alive here. ``poisoner`` is the first one whose call
    made the device context unusable, and what it raised: all that follow raise the same.
    """

    def __init__(self, timer: Timer, owners: Mapping[Call, K], before: Callable[[K], None]) -> None:
        self.poisoner: tuple[K, BaseException] | None = None
        self._timer = timer
        self._before = before
        self._owners = {id(call): owner for call, owner in owners.items()}

    @property
    def quantile(self) -> float:
        return self._timer.quantile

    @property
    def block(self) -> int:
        return self._timer.block

    @property
    def facts(self) -> Mapping[str, Scalar]:
        return self._timer.facts

    def now(self) -> float:
        return self._timer.now()

    def run(self, call: Call) -> None:
        with self._told(call):
            self._timer.run(call)

    def prepare(self, call: Call, settings: TimingSettings) -> Prepared:
        with self._told(call):
            prepared = self._timer.prepare(call, settings)
        if id(call) in self._owners:
            self._owners[id(prepared.call)] = self._owners[id(call)]
        return prepared

    def sample(self, call: Call, repeats: int) -> Sample:
        with self._told(call):
            return self._timer.sample(call, repeats)

    def load(self) -> Mapping[str, float]:
        return self._timer.load()

    @contextmanager
    def _told(self, call: Call) -> Iterator[None]:
        owner = self._owners.get(id(call))
        if owner is not None:
            self._before(owner)
        try:
            yield
        except Exception as error:
            if owner is not None and self.poisoner is None and is_poison(message(error)):
                self.poisoner = (owner, error)
            raise
