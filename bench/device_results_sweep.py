"""Runs the sweeps of a file, each as a process of its own, one at a time on each device.

``python -m autosel sweep LINE --db FILE`` is all that a line does, so that each result can be had
by hand. With several devices each has a database beside ``FILE`` (``FILE-0``, ``FILE-1`` before
its suffix) that begins with all that is known and is merged into ``FILE`` in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autosel.core import Device
from autosel.errors import AutoselError, field_error
from autosel.store import Store
from autosel.storefile import is_there
from bench import device_results_ahead
from bench.device_results_lines import Line
from bench.interrupts import INTERRUPTED
from bench.results_layers import slug

#: Seconds between looks at what runs: a look costs a fraction of a millisecond.
POLL_S = 0.5
#: Seconds a sweep gets to store what it has after an interrupt; then it is ended.
GRACE_S = 60.0
_DETECT = (
    "import json, sys; from autosel.device import detect; "
    "print(json.dumps(detect(sys.argv[1] or None).to_dict()))"
)


@dataclass
class Running:
    """A sweep that runs; ``log_at`` is where its output begins."""

    number: int
    line: Line
    process: subprocess.Popen[bytes]
    began: float
    log_at: int
    stopped: float | None = None


@dataclass
class Slot:
    """A device that runs one sweep at a time, with its database; the only one has no name."""

    name: str
    db: Path
    running: Running | None = None
    devices: dict[str, Device] = field(default_factory=dict)

    @cached_property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "CUDA_VISIBLE_DEVICES": self.name} if self.name else os.environ

    @property
    def log(self) -> Path:
        return self.db.with_name(f"{self.db.name}.log")

    def device(self, kind: str | None) -> Device:
        """The device that a sweep would run on, asked in a process of its own: this one must not
        take memory of a GPU."""
        wanted = kind or ""
        if wanted not in self.devices:
            done = subprocess.run(
                [sys.executable, "-c", _DETECT, wanted], env=self.environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                said = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
                where = f"device {self.name or kind or 'here'}"
                raise AutoselError(field_error(where, "answer", said[0], "a device"))
            self.devices[wanted] = Device.from_dict(json.loads(done.stdout))
        return self.devices[wanted]


class Runner:
    """All sweeps of a file on some devices.

    deadline_s  seconds after which nothing is started and what runs is ended; what is measured
                until then is kept
    ahead       processes that compile, at the lowest priority, what later lines need
                (:mod:`bench.device_results_ahead`); on CPUs there are none, they would disturb
    child       the command line program, for tests
    """

    def __init__(
        self,
        lines: Sequence[Line],
        db: Path,
        devices: Sequence[str] = (),
        *,
        deadline_s: float | None = None,
        ahead: int = 0,
        child: Sequence[str] = (sys.executable, "-m", "autosel"),
        say: Callable[[str], None] = lambda text: print(text, flush=True),
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.lines, self.db = list(lines), db
        parts = [db.with_name(f"{db.stem}-{slug(name)}{db.suffix}") for name in devices]
        self.slots = [Slot(*both) for both in zip(devices, parts, strict=True)] or [Slot("", db)]
        self.deadline_s, self.ahead = deadline_s, ahead
        self.ends: Counter[str] = Counter()
        self._child, self._say = tuple(child), say
        self._poll_s, self._grace_s = poll_s, grace_s
        self._pending = list(enumerate(self.lines, 1))
        self._began = time.monotonic()

    def run(self) -> int:
        """0 all there; 1 where one failed; 130 interrupted. Merging is done at every end."""
        self._began = time.monotonic()
        if self.slots[0].db != self.db:
            self._merge(self.slots, self.db)
            for slot in self.slots:
                if is_there(self.db):
                    with Store.open(slot.db, strict=True) as store:
                        store.merge(self.db)
        interrupted = False
        helper = self._compile_ahead()
        try:
            self._loop()
        except KeyboardInterrupt:
            interrupted = True
            self._end_all()
        finally:
            if helper is not None:
                device_results_ahead.end(helper)
            for slot in self.slots:  # after an error of our own nothing is left running
                if slot.running:
                    self._kill(slot.running)
            if self.slots[0].db != self.db:
                self._merge(self.slots, self.db)
        self._summary(interrupted)
        return INTERRUPTED if interrupted else int(self.ends["failed"] > 0)

    def _compile_ahead(self) -> subprocess.Popen[bytes] | None:
        """Helpers for the lines that do not begin at once; those compile for themselves."""
        first = self.slots[0]
        if self.ahead < 1 or len(self.lines) <= len(self.slots):
            return None
        device = first.device(self.lines[0].device)
        if device.kind == "cpu":
            return None
        return device_results_ahead.start(
            self.lines, first.db, device, first.environment,
            helpers=self.ahead, skip=len(self.slots),
        )  # fmt: skip

    # one sweep -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            late = self.deadline_s is not None and self._seconds() >= self.deadline_s
            for slot in self.slots:
                self._look(slot, late)
                while not (slot.running or late) and self._pending:
                    self._start(slot, *self._pending.pop(0))
            if not any(slot.running for slot in self.slots) and (late or not self._pending):
                return
            time.sleep(self._poll_s)

    def _start(self, slot: Slot, number: int, line: Line) -> None:
        device = slot.device(line.device)
        if is_there(slot.db):
            with Store.open(slot.db, strict=True) as store:
                if line.decided(store, device) >= line.counts(device):
                    self._tell(number, line, "complete", "skipped: the database has all of it")
                    return
        with slot.log.open("ab") as log:
            log.write(f"\n$ autosel sweep {line.text} --db {slot.db}\n".encode())
            log.flush()
            at = log.tell()
            # In a session of its own: an interrupt from the keyboard comes here alone, and is
            # handed on once.
            process = subprocess.Popen(
                [*self._child, "sweep", *line.words, "--db", str(slot.db)],
                env=slot.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        slot.running = Running(number, line, process, time.monotonic(), at)

    def _look(self, slot: Slot, late: bool) -> None:
        now = slot.running
        if now is None:
            return
        status = now.process.poll()
        if status is not None:
            slot.running = None
            self._ended(slot, now, status)
        elif late:
            self._stop(now)

    def _ended(self, slot: Slot, now: Running, status: int) -> None:
        seconds = time.monotonic() - now.began
        on = f" on {slot.name}" if slot.name else ""
        device = slot.device(now.line.device)
        with Store.open(slot.db, strict=True) as store:
            decided = f"{now.line.decided(store, device)} of {now.line.counts(device)} decided"
        if now.stopped is not None:
            self._tell(now.number, now.line, "cut short", f"{seconds:.0f} s{on}, {decided}; ended")
        elif status:
            why = _last_words(slot.log, now.log_at)
            text = f"failed with status {status} after {seconds:.0f} s{on}, {decided}: {why}"
            self._tell(now.number, now.line, "failed", f"{text} ({slot.log})")
        else:
            self._tell(now.number, now.line, "done", f"{seconds:.0f} s{on}, {decided}")

    # ends ------------------------------------------------------------------------------------

    def _stop(self, now: Running) -> None:
        """Interrupt a sweep, which then stores what it has; end it where it does not."""
        if now.stopped is None:
            now.stopped = time.monotonic()
            now.process.send_signal(signal.SIGINT)
        elif time.monotonic() - now.stopped > self._grace_s:
            self._kill(now)

    def _end_all(self) -> None:
        while any(slot.running for slot in self.slots):
            for slot in self.slots:
                self._look(slot, late=True)
            time.sleep(min(self._poll_s, 0.1))

    def _kill(self, now: Running) -> None:
        with contextlib.suppress(ProcessLookupError):  # its workers are in its group
            os.killpg(now.process.pid, signal.SIGKILL)
        now.process.wait()

    def _merge(self, slots: Sequence[Slot], into: Path) -> None:
        parts = [slot.db for slot in slots if is_there(slot.db)]
        if parts:
            with Store.open(into, strict=True) as store:
                for part in parts:
                    store.merge(part)

    # words -----------------------------------------------------------------------------------

    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _tell(self, number: int, line: Line, end: str, text: str) -> None:
        self.ends[end] += 1
        self._say(f"[{number}/{len(self.lines)}] {line.text}: {text}")

    def _summary(self, interrupted: bool) -> None:
        left = len(self.lines) - sum(self.ends.values())
        parts = [f"{count} {end}" for end, count in self.ends.items()]
        parts += [f"{left} not started"] if left else []
        why = "interrupted; " if interrupted else ""
        again = "" if not left and not self.ends["cut short"] else "; the same command goes on"
        self._say(
            f"{why}{len(self.lines)} sweeps in {self._seconds():.0f} s: {', '.join(parts)}; "
            f"kept in {self.db}{again}"
        )


def _last_words(log: Path, start: int) -> str:
    """The line that says why a sweep failed: its last error, else its last line."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it said nothing"])[-1]
