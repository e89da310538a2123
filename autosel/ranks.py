"""Lets the ranks of a torch.distributed group agree: one leads, the others do as it says.

Everything goes over a gloo group of its own beside the caller's, on host memory: nothing of it is
queued on a device, so NCCL's watchdog has nothing to wait for, and no collective of the caller is
disturbed. Messages are JSON as uint8 tensors, their size first; nothing is ever unpickled.

While the leader works (it may tune for hours), the others wait at one place. The leader gives a
sign of life every few seconds from a thread; a rank that hears nothing for ``silence_s``, or is
told that the leader failed, raises :class:`RankError`, the same line on every rank.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from autosel.errors import RankError, field_error
from autosel.records import to_json

T = TypeVar("T")

#: Longer messages are refused: a model's table of choices has kilobytes.
MAX_BYTES = 64 << 20

_BEAT, _ANSWER, _FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    meet     for the last rank to arrive where they agree: others may still load weights
    silence  without a sign of life from a leader that works
    beat     between its signs
    """

    meet: float = 1800.0
    silence: float = 120.0
    beat: float = 5.0


class Ranks:
    """The ranks of one group. All of them make one, and call the same methods in the same order.

    Not to be shared by threads that agree on different things at once.
    """

    def __init__(self, group: Any = None, *, patience: Patience | None = None) -> None:
        """``group`` is a process group of torch.distributed, all ranks when None.

        Raises RankError where torch.distributed is not up or lacks gloo, and when a rank does not
        arrive.
        """
        if not distributed.is_available() or not distributed.is_initialized():
            raise RankError(field_error("ranks", "torch.distributed", "not up", "a process group"))
        self.patience = patience or Patience()
        given = distributed.group.WORLD if group is None else group
        self.global_ranks: tuple[int, ...] = tuple(distributed.get_process_group_ranks(given))
        own = distributed.get_rank()
        if own not in self.global_ranks:
            raise RankError(field_error("ranks", f"rank {own}", "outside the group", "inside"))
        self.rank = self.global_ranks.index(own)
        self.size = len(self.global_ranks)
        self._leader = self.global_ranks[0]
        self._broken = False
        with self._guarded():
            self._group = _side_group(self.global_ranks, self.patience.meet)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in the order of ranks."""
        content = _encode(value)
        with self._guarded():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            own = torch.tensor([len(content)], dtype=torch.int64)
            self._wait(
                distributed.all_gather(sizes, own, self._group, async_op=True), self.patience.meet
            )
            lengths = [_length(size) for size in sizes]
            padded = torch.zeros(max(lengths), dtype=torch.uint8)
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            work = distributed.all_gather(parts, padded, self._group, async_op=True)
            self._wait(work, self.patience.silence)
        pairs = zip(parts, lengths, strict=True)
        return [_decode(bytes(part[:length].numpy())) for part, length in pairs]

    def lead(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns on the leader (plain JSON), on every rank.

        Only the leader calls ``work``; it may take as long as it likes and must not use this
        object. When it raises, every rank raises RankError with the same line. An interrupt of the
        leader (KeyboardInterrupt, SystemExit) is passed on there after the others were told.
        """
        return self._work(work) if self.is_leader else self._follow()

    # the leader ------------------------------------------------------------------------------

    def _work(self, work: Callable[[], Any]) -> Any:
        try:
            with self._signs_of_life():
                content = _encode(work())
        except RankError:
            raise
        except Exception as error:
            line = _line(error)
            self._send(_FAILED, line.encode())
            raise RankError(line) from error
        except BaseException as error:
            with contextlib.suppress(RankError):
                self._send(_FAILED, _line(error).encode())
            raise
        self._send(_ANSWER, content)
        return _decode(content)

    @contextlib.contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Tell the others every few seconds that there is still somebody working."""
        done, trouble = threading.Event(), list[RankError]()

        def beat() -> None:
            try:
                self._send(_BEAT)  # there: from now on silence counts
                while not done.wait(self.patience.beat):
                    self._send(_BEAT)
            except RankError as error:
                trouble.append(error)

        thread = threading.Thread(target=beat, name="autosel-ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if trouble:
            raise trouble[0]

    def _send(self, kind: int, content: bytes = b"") -> None:
        with self._guarded():
            head = torch.tensor([kind, len(content)], dtype=torch.int64)
            self._broadcast(head, self.patience.meet)
            if content:
                body = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                self._broadcast(body, self.patience.silence)

    # the others ------------------------------------------------------------------------------

    def _follow(self) -> Any:
        arrived = False
        while True:
            with self._guarded():
                head = torch.zeros(2, dtype=torch.int64)
                # The first word also waits for a leader that has not come here yet.
                self._broadcast(head, self.patience.silence if arrived else self.patience.meet)
                arrived = True
                kind, length = int(head[0]), _length(head[1:])
                body = torch.empty(length, dtype=torch.uint8)
                if length:
                    self._broadcast(body, self.patience.silence)
            if kind == _ANSWER:
                return _decode(bytes(body.numpy()))
            if kind == _FAILED:
                raise RankError(bytes(body.numpy()).decode(errors="replace"))

    # both ------------------------------------------------------------------------------------

    def _broadcast(self, tensor: torch.Tensor, limit_s: float) -> None:
        work = distributed.broadcast(tensor, self._leader, self._group, async_op=True)
        self._wait(work, limit_s)

    def _wait(self, work: Any, limit_s: float) -> None:
        if not work.wait(timeout=timedelta(seconds=limit_s)):
            raise RuntimeError("timed out")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """One line, the same on every rank that is left, when another is gone or hangs."""
        if self._broken:
            raise RankError(_GONE)
        try:
            yield
        except RankError:
            raise
        except (RuntimeError, ValueError) as error:  # gloo's words differ from rank to rank
            self._broken = True
            raise RankError(_GONE) from error


_GONE = field_error("ranks", "answer", "none from a rank that ended, hangs or never came", "all")

_groups: list[tuple[Any, tuple[int, ...], Any]] = []
_groups_lock = threading.Lock()


def _side_group(global_ranks: tuple[int, ...], timeout_s: float) -> Any:
    """The gloo group of these ranks, made once: a model has sixty layers."""
    world = distributed.group.WORLD
    with _groups_lock:
        # A process may take torch.distributed down and up again.
        _groups[:] = [entry for entry in _groups if entry[0] is world]
        for _, ranks, made in _groups:
            if ranks == global_ranks:
                return made
        made = distributed.new_group(
            list(global_ranks),
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            # Otherwise the ranks outside the group would have to call this as well.
            use_local_synchronization=len(global_ranks) < distributed.get_world_size(),
        )
        _groups.append((world, global_ranks, made))
        return made


def _encode(value: Any) -> bytes:
    content = to_json(value).encode()
    if len(content) > MAX_BYTES:
        raise RankError(field_error("ranks", "message", len(content), f"at most {MAX_BYTES} bytes"))
    return content


def _decode(content: bytes) -> Any:
    return json.loads(content)


def _length(tensor: torch.Tensor) -> int:
    length = int(tensor[0])
    if not 0 <= length <= MAX_BYTES:
        raise RankError(field_error("ranks", "message", length, f"0 to {MAX_BYTES} bytes"))
    return length


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return f"the leading rank failed: {text}"
