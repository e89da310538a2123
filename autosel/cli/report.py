"""What a command hands back, and how it reaches the screen.

A command never prints: it returns a :class:`Report` holding its data (for ``--json``) and the parts
to show. Results go to standard output; progress, notes and warnings go to standard error.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from autosel.cli.streams import to_null
from autosel.cli.text import one_line, printable, to_json

#: Wide enough that no line of a report that is not read on a terminal is ever wrapped or cut.
_UNWRAPPED = 100_000
#: Letters of a column that may be folded; fewer cannot be read.
_NARROWEST = 4


@dataclass(frozen=True)
class Table:
    """Rows of text. A column name that starts with ``>`` is right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""


@dataclass(frozen=True)
class Report:
    """A command's answer: ``data`` as JSON, or ``parts`` (sentences and tables) in order.

    ``always_json`` is for a command whose answer has no other form.
    """

    data: Mapping[str, Any]
    parts: Sequence[str | Table] = field(default_factory=tuple)
    exit_code: int = 0
    always_json: bool = False


class ReaderGoneError(Exception):
    """Whoever read our standard output stopped; there is nobody to tell."""


@contextlib.contextmanager
def stdout_reserved() -> Iterator[None]:
    """Send what libraries print meanwhile to standard error, C libraries and children included.

    Standard output is for the report alone, so that ``--json`` stays valid whatever is loaded.
    """
    with contextlib.ExitStack() as stack:
        stdout = sys.__stdout__
        if stdout is not None and stdout is sys.stdout:
            stdout.flush()
            kept = os.dup(1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            yield
        except BrokenPipeError as error:
            # Of a helper process. Click would take it for our reader's and end without a word.
            raise RuntimeError(f"a helper process went away: {error}") from error


def emit(report: Report, *, as_json: bool) -> None:
    """Write the report to standard output."""
    try:
        click.echo(to_json(report.data) if as_json or report.always_json else as_text(report))
    except BrokenPipeError as error:
        raise ReaderGoneError from error


def as_text(report: Report) -> str:
    """The report for people: sentences as they are, tables with an empty line around them."""
    blocks: list[str] = []
    previous: object = None
    for part in report.parts:
        if blocks and (isinstance(part, Table) or isinstance(previous, Table)):
            blocks.append("")
        blocks.append(render(part) if isinstance(part, Table) else printable(part))
        previous = part
    return "\n".join(blocks)


def render(table: Table) -> str:
    """The table as text: boxed and fitted to a terminal, else plain columns that never wrap.

    Plain too on a terminal that is too narrow for it, where columns would vanish without a word.
    """
    width = shutil.get_terminal_size().columns
    terminal = sys.stdout.isatty() and width >= _least_width(table)
    console = Console(
        file=io.StringIO(),
        width=width if terminal else _UNWRAPPED,
        force_terminal=terminal,
        legacy_windows=False,
        highlight=False,
    )
    drawn = RichTable(
        box=box.SIMPLE_HEAD if terminal else None,
        header_style="bold",
        pad_edge=False,
        collapse_padding=terminal,
        title_justify="left",
    )
    for name in table.columns:
        right = name.startswith(">")
        drawn.add_column(
            Text(name.removeprefix(">")),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=right,  # a number cut in two misleads
        )
    for row in table.rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    if table.title:
        console.print(Text(printable(table.title), style="bold"))
    console.print(drawn)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def _least_width(table: Table) -> int:
    """Letters that the boxed table needs: some of each column's text, and two around it."""
    least = 0
    for number, name in enumerate(table.columns):
        cells = [name.removeprefix(">"), *(printable(row[number]) for row in table.rows)]
        widest = max(max(map(cell_len, text.splitlines()), default=0) for text in cells)
        least += 2 + (widest if name.startswith(">") else min(widest, _NARROWEST))
    return least


def note(message: object) -> None:
    """One line for people on standard error; dropped where that is full or has no reader."""
    say(one_line(message))


def say(text: str) -> None:
    """Text of several lines for people on standard error."""
    try:
        click.echo(text, err=True)
    except OSError:
        to_null(sys.stderr)


def warn(message: object) -> None:
    """One warning on standard error."""
    note(f"warning: {message}")
