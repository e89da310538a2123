"""Figures of what the store holds, for the command line and :func:`autosel.plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autosel import plots
from autosel.atomic import atomic_file
from autosel.errors import AutoselError, field_error
from autosel.evidence import Evidence
from autosel.plot_style import check_path, save
from autosel.store import Store


def write(
    kind: str, found: Sequence[Evidence], path: str | Path, options: plots.Options | None = None
) -> Path:
    """Draw one kind of figure into ``path``: PNG, SVG, or CSV for the table that it draws.

    Raises AutoselError in one line where there is nothing to draw, and MissingPackageError without
    matplotlib; nothing is left behind then.
    """
    target = check_path(path)
    drawn, chosen = plots.kind(kind), options or plots.Options()
    if not found:
        raise AutoselError(field_error("plot", "measured layers", "none", "a sweep first"))
    if target.suffix.lower() != ".csv":
        return save(drawn.figure(found, chosen), target)
    table = drawn.table(found, chosen)
    if table.empty:
        raise AutoselError(field_error("plot", f"rows of {kind}", "none", "at least one"))
    with atomic_file(target) as partial:
        table.to_csv(partial, index=False)
    return target


def nothing_here(store: Store, one: Evidence) -> AutoselError:
    """Why nothing can be drawn of a layer, with the nearest entry that there is."""
    nearest = store.nearest(one.problem, one.device, one.routing)
    way = ", ".join(f"{name}={value}" for name, value in one.timing)
    if nearest is None:
        found = "an empty database"
    elif nearest.exact:
        found = f"none that was correct and timed with {way}"
    else:
        found = f"none; the nearest entry differs: {nearest}"
    return AutoselError(
        field_error("plot", "timed candidates of this layer here", found, "a sweep first")
    )
