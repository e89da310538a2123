"""A text file of sweeps: the words of one ``autosel sweep`` a line, ``#`` begins a comment.

Every line is checked as the command itself would read it before anything runs, so that a mistyped
option in the last line does not show after an hour.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from autosel import registry
from autosel.cli.commands.sweep import command
from autosel.cli.options import LayerOptions
from autosel.cli.target import Target, check_routing, resolve
from autosel.core import Device, Problem
from autosel.errors import AutoselError, field_error
from autosel.sources import WeightSource
from autosel.store import Store
from autosel.tune_types import SweepSettings


@dataclass(frozen=True)
class Line:
    """One sweep: its words, and what they mean.

    asked  settings that a stored sweep must have had to have answered this line
    """

    words: tuple[str, ...]
    problems: tuple[Problem, ...]
    tokens: tuple[int, ...]
    routing: str
    device: str | None
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return shlex.join(self.words)

    def counts(self, device: Device) -> int:
        """Decisions that the whole of this line makes on ``device``."""
        return len(self.problems) * len(SweepSettings(token_counts=self.tokens).tokens(device))

    def decided(self, store: Store, device: Device) -> int:
        """How many of these ``store`` has from sweeps that were asked the same."""
        if not device.name.strip():
            return 0
        alike = [
            sweep.id
            for sweep in store.sweeps()
            if sweep.device == device
            and all(sweep.settings.get(name) == value for name, value in self.asked.items())
        ]
        wanted = set(SweepSettings(token_counts=self.tokens).tokens(device))
        found = {
            (problem, stored.decision.bucket.measured)
            for problem in self.problems
            for number in alike
            for stored in store.stored_decisions(
                problem, device, self.routing, sweep_id=number, history=True
            )
        }
        return sum(count in wanted for _, count in found)


def read_lines(path: Path) -> list[Line]:
    """The sweeps in a file, in its order; AutoselError, with file and line, for what is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise AutoselError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise AutoselError(field_error(str(path), "text", "other bytes", "UTF-8")) from None
    found: dict[tuple[str, ...], int] = {}
    lines = []
    for number, raw in enumerate(text.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            words = tuple(shlex.split(raw, comments=True))
        except ValueError as error:
            raise AutoselError(
                field_error(where, "words", str(error).lower(), "as a shell has them")
            ) from None
        if not words:
            continue
        if words in found:
            raise AutoselError(
                field_error(where, "sweep", f"that of line {found[words]} again", "each once")
            )
        found[words] = number
        lines.append(read_words(words, where))
    if not lines:
        raise AutoselError(field_error(str(path), "sweeps", "none", "at least one line"))
    return lines


def layer_sources(words: Sequence[str], where: str) -> tuple[WeightSource, ...]:
    """The weights of each layer that a sweep's words mean; AutoselError for what is no sweep."""
    return tuple(layer.source for layer in _meaning(tuple(words), where)[1].layers)


def _meaning(words: tuple[str, ...], where: str) -> tuple[dict[str, Any], Target]:
    """A sweep's options, backends by their own names, and what it is a sweep of."""
    try:
        context = command.make_context("autosel sweep", list(words))
        given = dict(context.params)
        if context.get_parameter_source("db") is ParameterSource.COMMANDLINE:
            raise AutoselError("--db: found in the line, expected beside the file")
        options = LayerOptions(**{item.name: given[item.name] for item in fields(LayerOptions)})
        target = resolve(given["target"], options)
        check_routing(given["routing"], target)
        given["backends"] = [registry.get(name).name for name in given["backends"]]
    except click.exceptions.Exit:
        raise AutoselError(field_error(where, "option", "--help", "a sweep")) from None
    except click.ClickException as error:
        raise AutoselError(f"{where}: {' '.join(error.format_message().split())}") from None
    except AutoselError as error:
        raise AutoselError(f"{where}: {error}") from None
    return given, target


def read_words(words: tuple[str, ...], where: str) -> Line:
    """One sweep; AutoselError, which begins with ``where``, for words that are none."""
    given, target = _meaning(words, where)
    budget = given["budget"]
    asked = {
        "backends": given["backends"],
        "allow_a8": given["allow_a8"],
        "require": list(given["require"]),
        "trials": budget.trials if budget and budget.trials else given["trials"],
        "search_within": given["search_within"],
        "seed": given["seed"],
    }
    problems = tuple(layer.problem for layer in target.layers)
    return Line(words, problems, given["tokens"], given["routing"], given["device"], asked)
