"""How every figure looks, and how it reaches a file without a display.

Series differ in colour, marker and line style at once, so that a figure survives a black-and-white
printer. Colours are those of Okabe and Ito's palette for all kinds of colour vision
(https://jfly.uni-koeln.de/color/). Figures are made without pyplot, so neither MPLBACKEND nor
DISPLAY nor a user's matplotlibrc changes them.
"""

from __future__ import annotations

import importlib
import io
import itertools
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosel.atomic import atomic_file
from autosel.errors import AutoselError, MissingPackageError, field_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The third is a figure's table.
FORMATS = (".png", ".svg", ".csv")

GREY = "#555555"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F6000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
#: The same as characters of a text.
_SYMBOLS = dict(zip(_MARKERS, "●■▲◆▼✚✖★◀▶⬢", strict=True))
_LINES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (3, 1, 1, 1, 1, 1)),
    (0, (8, 2)),
    (0, (2, 2)),
)
_HATCHES = ("", "///", "...", "\\\\\\", "xx", "---", "oo", "|||", "++", "//", "**")
#: Backends keep their looks from figure to figure. Those of one line never run on one device.
_PLACES: tuple[tuple[str, ...], ...] = (
    ("wna16_tiled", "cpu_native"),
    ("humming", "zen_cpu"),
    ("marlin", "cpu"),
    ("marlin_int8", "torch_int4"),
    ("triton", "cpu_dense"),
    ("emulation",),
    ("moe_wna16", "torch_int8"),
    ("batched_humming",),
    ("batched_marlin",),
    ("flashinfer_trtllm", "rdna3", "xpu"),
)
_RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "autosel",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "savefig.dpi": 150,
    "hatch.linewidth": 0.5,
}


@dataclass(frozen=True, slots=True)
class Style:
    """One series' colour, marker, line style and hatch; ``pale`` is the colour for areas."""

    colour: str
    marker: str
    line: Any
    hatch: str = ""

    @property
    def symbol(self) -> str:
        """The marker as a character."""
        return _SYMBOLS[self.marker]

    @property
    def pale(self) -> str:
        """The colour with three parts of white."""
        parts = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{(part + 3 * 255) // 4:02x}" for part in parts)


@dataclass(frozen=True, slots=True)
class Caption:
    """The words around a figure: a title, a line under it and the footer's lines.

    ``notes`` are the footer's further lines; a small figure leaves them out, the last one first.
    """

    title: str
    subtitle: str = ""
    footer: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each name, the same for the same set of names whatever their order.

    A backend has its own in every figure, with or without " (a8)" behind its name; other names,
    and those after the first of a line of the table, take what is free.
    """
    wanted = sorted(set(names))
    taken: dict[str, int] = {}
    for place, backends in enumerate(_PLACES):
        for backend in backends:
            first = next((name for name in wanted if name.split(" ")[0] == backend), None)
            if first is not None:
                taken[first] = place
                break
    free = (i for i in itertools.count() if i not in taken.values())
    for name in wanted:
        if name not in taken:
            taken[name] = next(free)
    return {
        name: Style(
            _COLOURS[i % len(_COLOURS)],
            _MARKERS[i % len(_MARKERS)],
            _LINES[i % len(_LINES)],
            _HATCHES[i % len(_HATCHES)],
        )
        for name, i in taken.items()
    }


def check_path(path: str | Path) -> Path:
    """``path`` if a figure can be written there; asked before any work is done for it."""
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise AutoselError(
            field_error(str(target), "suffix", repr(target.suffix), ", ".join(FORMATS))
        )
    if not target.absolute().parent.is_dir():
        raise AutoselError(
            field_error(str(target), "folder", "nothing", f"a folder {target.absolute().parent}")
        )
    return target


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure as PNG or SVG by suffix; nothing is left behind when that fails."""
    target = check_path(path)
    kind = target.suffix.lower().removeprefix(".")
    # A date inside the file would make equal figures differ.
    metadata = {"Date": None} if kind == "svg" else {"Software": "autosel"}
    with drawing(), atomic_file(target) as partial:
        figure.savefig(partial, format=kind, metadata=metadata)
    return target


def svg_text(figure: Figure) -> str:
    """The figure as an SVG document."""
    out = io.StringIO()
    with drawing():
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


@dataclass(frozen=True, slots=True)
class Frame:
    """A captioned figure and the box, in fractions of it, that is left for axes."""

    figure: Figure
    left: float
    bottom: float
    right: float
    top: float

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of the free box."""
        width, height = self.figure.get_size_inches()
        return (self.right - self.left) * float(width), (self.top - self.bottom) * float(height)


def new_frame(size: tuple[float, float], caption: Caption) -> Frame:
    """A figure of ``size`` inches on the Agg canvas with its caption drawn, wrapped to fit."""
    width, height = size
    figure: Figure = _module("matplotlib.figure").Figure(figsize=size)
    _module("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    room = width - 2 * _MARGIN
    title = wrap(caption.title, room, 11, bold=True)
    subtitle = wrap(caption.subtitle, room, 8.5)
    footer = [line for text in (*caption.footer, *caption.notes) for line in wrap(text, room, 7)]
    y = height - _MARGIN
    looks: tuple[tuple[list[str], float, dict[str, Any]], ...] = (
        (title, 11, {"fontweight": "bold"}),
        (subtitle, 8.5, {"color": GREY}),
    )
    for lines, points, look in looks:
        figure.text(
            _MARGIN / width, y / height, "\n".join(lines), va="top", ha="left", fontsize=points,
            linespacing=1.25, **look,
        )  # fmt: skip
        y -= len(lines) * points * 1.45 / 72
    figure.text(
        _MARGIN / width, _MARGIN / height, "\n".join(footer), va="bottom", ha="left", fontsize=7,
        linespacing=1.25, color=GREY,
    )  # fmt: skip
    floor = _MARGIN + len(footer) * 7 * 1.45 / 72 + 0.05
    return Frame(figure, _MARGIN / width, floor / height, 1 - _MARGIN / width, (y - 0.05) / height)


_MARGIN = 0.12  # inches


def wrap(text: str, inches: float, points: float, *, bold: bool = False) -> list[str]:
    """``text`` in lines of at most ``inches``; empty text gives no line.

    Measured and not counted in letters: digits and capitals are a quarter wider than the rest.
    Hinting at 150 dots an inch makes lines up to 5 % wider than the outlines that are measured.
    """
    weight = "bold" if bold else "normal"
    font = _module("matplotlib.font_manager").FontProperties(size=points, weight=weight)
    widths = _module("matplotlib.textpath").TextToPath()

    def fits(line: str) -> bool:
        width = widths.get_text_width_height_descent(line, font, ismath=False)[0]
        return bool(1.06 * width <= inches * 72)

    lines: list[str] = []
    for word in text.split():
        if lines and fits(f"{lines[-1]} {word}"):
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:  # a name may be longer than a line
            if lines[-1] and not fits(lines[-1] + letter):
                lines.append("")
            lines[-1] += letter
    return lines


@contextmanager
def drawing() -> Iterator[None]:
    """Our own settings in force, the user's out of force."""
    matplotlib = _module("matplotlib")
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        with warnings.catch_warnings():
            # Names in other scripts; the SVG has them as text, the PNG as boxes.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            yield


def _module(name: str) -> Any:
    """Import a part of matplotlib whatever its environment variables say.

    A broken MPLBACKEND makes the import itself fail, and a home folder that cannot be written
    makes it complain; neither matters for writing a file.
    """
    kept = {key: os.environ.pop(key) for key in ("MPLBACKEND",) if key in os.environ}
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            field_error("plot", "package matplotlib", f"none ({error})", "pip install matplotlib")
        ) from error
    finally:
        os.environ.update(kept)
