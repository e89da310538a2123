"""Printing names from hostile files, and JSON that a strict reader accepts."""

import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.cells import cell_len

from autosel.cli.report import Report, Table, as_text
from autosel.cli.text import (
    bytes_text,
    jsonable,
    one_line,
    percent_text,
    printable,
    time_text,
    to_json,
)


@pytest.mark.parametrize(
    "hostile",
    ["\x1b[31mred", "a\rb", "a\nb", "\x9b2J", "\u202eabc", "a\u2028b", "\udcff", "\x00", "\x07"],
)
def test_no_control_character_is_printed(hostile):
    for text in (printable(hostile), one_line(hostile)):
        assert text.isprintable()
        assert "\x1b" not in text
    table = as_text(Report({}, [Table(("name",), [(hostile,)], title=hostile)]))
    assert all(line.isprintable() for line in table.splitlines())
    assert len(table.splitlines()) == 3  # title, head, row: nothing broke the row


def test_ordinary_text_stays_as_it_is():
    assert printable("µs, Größe, 模型 [red]x[/red]") == "µs, Größe, 模型 [red]x[/red]"
    shown = as_text(Report({}, [Table(("a[b]c",), [("[bold]x[/bold]",)])]))
    assert shown.splitlines() == ["a[b]c", "[bold]x[/bold]"]


def test_a_table_that_no_terminal_shows_is_neither_wrapped_nor_cut():
    long = "word " * 200
    shown = as_text(Report({}, [Table(("reason", ">n"), [(long.strip(), 7)])]))
    assert shown.splitlines()[1] == f"{long.strip()}  7"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [1, 5, 10, 15, *range(20, 30), 40, 60, 100])
def test_no_column_vanishes_on_a_narrow_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout", Terminal())
    cells = ("x" * 30, "12345", "日本" * 5, "", "zzz", "q")
    shown = as_text(Report({}, [Table(("A", ">B", "C", "D", "E", "F"), [cells])]))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    for letter in "".join(cells) + "ABCDEF":
        assert plain.count(letter) == "".join(cells).count(letter) + (letter in "ABCDEF"), letter
    lines = plain.splitlines()
    if "─" in plain:
        assert max(map(cell_len, lines)) <= width
        # Four letters of each, or the number of lines says nothing.
        assert len(lines) <= 3 + -(-30 // 4)
    else:
        assert len(lines) == 2
        assert width < 40


@dataclass
class Thing:
    value: float
    path: Path


def test_json_is_strict_whatever_is_inside():
    value = {
        "nan": math.nan,
        "inf": [math.inf, -math.inf, np.float32("nan")],
        "thing": Thing(math.nan, Path("a/b")),
        3: np.int64(4),
        "set": {1},
        "bad\udcff": "x\udcff",
        "flag": True,
        "none": None,
        "type": float,
    }
    text = to_json(value)

    def refuse(word):
        raise AssertionError(word)

    read = json.loads(text, parse_constant=refuse)
    assert read["nan"] is None
    assert read["inf"] == [None, None, None]
    assert read["thing"] == {"value": None, "path": "a/b"}
    assert read["3"] == 4
    assert read["set"] == [1]
    assert read["flag"] is True
    text.encode("utf-8")
    assert "ud800" not in text.lower()
    for word in ("NaN", "Infinity"):
        assert word not in text


def test_jsonable_keeps_numbers():
    assert jsonable([1, 2.5, "a", None, True]) == [1, 2.5, "a", None, True]


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0 us"),
        (0.01234, "0.0123 us"),
        (9.876, "9.88 us"),
        (123.4, "123 us"),
        (999.4, "999 us"),
        (999.7, "1.00 ms"),
        (123456, "123 ms"),
        (1e6, "1.00 s"),
        (98765432, "98.8 s"),
    ],
)
def test_times(us, text):
    assert time_text(us) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "-"), (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 40, "3.00 TiB")],
)
def test_sizes(count, text):
    assert bytes_text(count) == text


def test_percent():
    assert [percent_text(x) for x in (None, 0.1234, -0.5, math.inf)] == [
        "-",
        "12.3 %",
        "-50.0 %",
        "-",
    ]
