"""Work on every layer of a target, whichever of them cannot be read: one never costs the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autosel.cli.report import note, warn
from autosel.cli.target import Layer, Target
from autosel.errors import AutoselError, CheckpointError, StoreError
from autosel.sources import WeightSource

T = TypeVar("T")


class Failures:
    """What went wrong so far: which layer of the target, and the line that says why."""

    def __init__(self, target: Target) -> None:
        self._alone = sum(max(len(layer.indices), 1) for layer in target.layers) == 1
        self.found: list[tuple[str, AutoselError]] = []

    def work(self, layer: Layer, work: Callable[[WeightSource], T]) -> T | None:
        """``work`` on the first of the alike layers that can be read; None where it fails.

        Only damage in the files is a matter of one layer; another error would meet the next alike
        one as well. What concerns the database concerns every layer and passes through, and so
        does the error of a layer that is the only one.
        """
        for label, source in layer.stand_ins():
            try:
                return work(source)
            except StoreError:
                raise
            except AutoselError as error:
                if self._alone:
                    raise
                is_its_own = isinstance(error, CheckpointError)
                self.found.append((label if is_its_own else layer.label, error))
                warn(f"{self.found[-1][0]}: {error}")
                if not is_its_own:
                    break
        return None

    def say(self, done: str) -> int:
        """The summary at the end, and the status that goes with it."""
        if self.found:
            note(f"error: not {done}: {', '.join(label for label, _ in self.found)} (see above)")
        return int(bool(self.found))

    def to_list(self) -> list[dict[str, str]]:
        """For the JSON report."""
        return [{"layer": label, "error": str(error)} for label, error in self.found]
