"""Shows a sweep while it runs, on standard error: a live line on a terminal, plain lines else."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from autosel.cli.report import note
from autosel.cli.text import one_line, time_text, tokens_text
from autosel.core import Candidate, Decision, Device, Measurement, Problem
from autosel.tune_types import Observer
from autosel.words import is_settled, settled_text

#: What a step's short name means to people.
_DOING = {
    "load": "reading weights",
    "pack": "packing",
    "compile": "compiling ahead for",
    "first call": "first call of",
    "verify": "verifying",
    "prove": "proving",
    "search": "searching settings of",
    "time": "timing",
}

#: The steps that a log has a line for, once for each token count.
_LINES = {
    "load": "reading weights and working out the right results",
    "pack": "packing and verifying",
    "compile": "waiting for kernels to compile",
    "search": "searching settings",
    "time": "timing what is correct",
}

#: Ends that are worth a line while the sweep runs; the others are in the report.
_LOUD = frozenset({"wrong", "nonfinite", "failed", "oom", "timeout", "crashed"})

#: Of one backend and status so many; a search may meet tens.
_ALIKE = 2


class SweepProgress(Observer):
    """A context manager around one sweep, or several after each other."""

    def __init__(self) -> None:
        self.label = ""
        self.fresh = 0
        self.resumed = 0
        self._console = Console(stderr=True)
        self._live: Progress | None = None
        self._task = None
        self._began = time.monotonic()
        self._said: set[tuple[str, int]] = set()
        self._left_out: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> SweepProgress:
        if sys.stderr.isatty():
            self._live = Progress(
                TextColumn("{task.fields[where]}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[what]}"),
                console=self._console,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def started(
        self, problem: Problem, device: Device, tokens: tuple[int, ...], backends: int
    ) -> None:
        counts = ",".join(map(str, tokens))
        self._said.clear()
        self._left_out.clear()
        many = f"{backends} backend{'' if backends == 1 else 's'}"
        self._say(f"{self.label}: {many} at {tokens_text(counts)} on {device.name}")
        if self._live is not None:
            for task in self._live.task_ids:
                self._live.remove_task(task)
            self._live.add_task("sweep", total=len(tokens), where=one_line(self.label), what="")

    def step(self, what: str, num_tokens: int, candidate: Candidate | None = None) -> None:
        doing = _DOING.get(what, what)
        who = candidate.key if candidate else "the layer" if what in ("pack", "load") else ""
        self._show(f"{tokens_text(num_tokens)}: {doing} {who}".rstrip())
        # Without a terminal a line for each step of each candidate would bury the results.
        if self._live is None and (what, num_tokens) not in self._said:
            self._said.add((what, num_tokens))
            if what in _LINES:
                self._say(f"{tokens_text(num_tokens)}: {_LINES[what]}")

    def timed(self, num_tokens: int, done: int, total: int) -> None:
        self._show(f"{tokens_text(num_tokens)}: timing, block {done} of at most {total}")

    def measured(self, measurement: Measurement, resumed: bool) -> None:
        if resumed:
            self.resumed += 1
            return
        self.fresh += 1
        if measurement.status in _LOUD:
            who, at = measurement.candidate, measurement.num_tokens
            alike = (who.backend, measurement.status)
            self._left_out[alike] += 1
            if self._left_out[alike] <= _ALIKE:
                self._say(f"{who.key} at {tokens_text(at)} is left out: {measurement.status}: "
                          f"{measurement.reason}")  # fmt: skip
            elif self._left_out[alike] == _ALIKE + 1:
                self._say(f"{who.backend}: further settings that are {measurement.status} are in "
                          "the report only")  # fmt: skip

    def decided(self, decision: Decision) -> None:
        took = time_text(decision.winner_us)
        settled = settled_text(decision)
        tie = "" if is_settled(decision) else f" ({settled.removeprefix('no: ')})"
        self._say(f"{tokens_text(decision.bucket.label)}: {decision.winner.key} {took}{tie}")
        if self._live is not None:
            for task in self._live.task_ids:
                self._live.advance(task)

    def _show(self, what: str) -> None:
        if self._live is not None:
            for task in self._live.task_ids:
                self._live.update(task, what=one_line(what))

    def _say(self, text: str) -> None:
        seconds = int(time.monotonic() - self._began)
        line = f"[{seconds // 60}:{seconds % 60:02d}] {one_line(text)}"
        if self._live is not None:
            self._live.console.print(Text(line), soft_wrap=True)
        else:
            note(line)
