"""Makes ``results/`` browsable: ``python -m bench.results_index``.

For each folder in ``results/``: ``plots/*.svg`` and ``report.html`` from everything that was
measured there, and one ``results/index.html`` over all. A folder may hold databases (``*.db``),
decision packs in ``packs/`` (:mod:`bench.device_results`), exports and further packs (``*.json``),
and the tables that :mod:`bench.results_data` knows by name; what cannot be read stops the script
with one line. What several of them hold is shown once, from the first of them in this order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import autosel
from autosel import evidence_files, figures, plots
from autosel.core import Measurement
from autosel.errors import AutoselError
from autosel.evidence import Evidence
from autosel.report_data import report_data
from autosel.report_page import write_report
from autosel.report_verdict import Verdict
from autosel.roofline import Ceilings
from bench import results_data
from bench.device_results_export import ENVIRONMENT, read_environment
from bench.results_layers import named, slug, with_best_ceilings

#: Tables without samples, by file name.
TABLES: Mapping[str, Callable[[Path], list[Evidence]]] = {
    "kernels.csv": results_data.h200_evidence,
    "cpu.csv": results_data.epyc_evidence,
}
SUMMARY_KINDS = ("speedup", "crossover")
#: Figures of each layer.
LAYER_KINDS = ("latency",)


@dataclass(frozen=True)
class Drawn:
    """A figure's file in ``plots/`` and what it shows, in words."""

    file: str
    words: str


@dataclass(frozen=True)
class DevicePage:
    """What the index says about one folder."""

    folder: str
    name: str
    overall: str
    verdicts: tuple[Verdict, ...]
    figures: tuple[Drawn, ...]
    files: tuple[str, ...]


def gather(folder: Path) -> list[Evidence]:
    """Everything measured in ``folder``, each layer once, with labels that differ.

    A table's layer is left out where samples of it are there.
    """
    measured = [one for path in sorted(folder.glob("*.db")) for one in _read(path)]
    layers = read_environment(folder).get("layers", {})
    for path in sorted(folder.glob("packs/*.json")):
        measured += [_with_facts(one, layers.get(path.stem)) for one in _read(path)]
    for path in sorted(folder.glob("*.json")):
        if path.name != ENVIRONMENT:
            measured += _read(path)
    once = {_key(one): one for one in reversed(measured)}
    sampled = [one for one in measured if once[_key(one)] is one]
    known = {(one.problem, one.routing) for one in sampled}
    tables = [
        one
        for name, read in TABLES.items()
        if (folder / name).is_file()
        for one in read(folder / name)
        if (one.problem, one.routing) not in known
    ]
    return sorted(with_best_ceilings(named(sampled)), key=_name) + tables


def _read(path: Path) -> list[Evidence]:
    """What was timed with cold caches, or with hot ones where that is all there is."""
    try:
        return evidence_files.read(path)
    except AutoselError as error:
        try:
            return evidence_files.read(path, timing={"cache": "hot"})
        except AutoselError:
            raise error from None


def _name(one: Evidence) -> tuple[str, str]:
    """A layer's usual routing before others."""
    return one.label.partition(", ")[0], one.label


def _key(one: Evidence) -> tuple[object, ...]:
    return one.problem, one.device, one.routing, one.timing


def _with_facts(one: Evidence, facts: Any) -> Evidence:
    """A pack's evidence with what packs do not have: the machine's ceilings, and the seed.

    A pack has not all that was tried, so the cost of tuning cannot be told from it: what each step
    took is left out, and with it that figure.
    """
    facts = facts if isinstance(facts, Mapping) else {}
    swept = str(facts.get("command", ""))
    one = replace(one, measurements=tuple(map(_without_cost, one.measurements)), swept=swept)
    known = facts.get("ceilings")
    if known is None:
        return one
    try:
        ceilings, seed = Ceilings(**known), int(facts.get("seed", 0))
    except (TypeError, ValueError) as error:
        raise AutoselError(f"{ENVIRONMENT}, {one.label}: ceilings: {error}") from None
    return replace(one, ceilings=ceilings, seed=seed)


def _without_cost(m: Measurement) -> Measurement:
    timing = tuple(pair for pair in m.timing if pair[0] != "wall_s")
    return replace(m, pack_ms=None, first_call_ms=None, verify_ms=None, timing=timing)


def make_device(folder: Path) -> DevicePage | None:
    """Draw and write one folder; None where nothing in it was measured."""
    found = gather(folder)
    if not found:
        return None
    places = folder / "plots"
    places.mkdir(exist_ok=True)
    for old in places.glob("*.svg"):
        old.unlink()
    drawn = []
    # Samples and tables of medians are not mixed in one figure: only the former have intervals.
    summary = [one for one in found if not one.figures] or found
    jobs: list[tuple[str, str, Sequence[Evidence]]] = [(k, k, summary) for k in SUMMARY_KINDS]
    jobs += [(f"{kind}-{slug(one.label)}", kind, [one]) for one in found for kind in LAYER_KINDS]
    for name, kind, shown in jobs:
        options = plots.Options()
        try:
            figures.write(kind, shown, places / f"{name}.svg", options)
        except AutoselError as error:
            print(f"{folder.name}: no figure {name}: {error}", file=sys.stderr)
            continue
        words = plots.kind(kind).describe(plots.kind(kind).table(shown, options))
        drawn.append(Drawn(f"{name}.svg", words))
    device = found[0].device.name
    made = f"Made from the files in results/{folder.name} by autosel {autosel.__version__}"
    write_report(summary, folder / "report.html", title=f"Measured on {device}", made=made)
    data = report_data(found, title="", made="")
    files = [
        str(path.relative_to(folder))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent != places and path.name != "report.html"
    ]
    return DevicePage(folder.name, device, data.overall, data.verdicts, tuple(drawn), tuple(files))


def make_index(root: Path) -> Path:
    """Everything under ``root``; returns the index's file."""
    devices = [make_device(folder) for folder in sorted(root.iterdir()) if folder.is_dir()]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    )
    css = Path(autosel.__file__).parent / "templates" / "report.css"
    text = template.render(
        devices=[page for page in devices if page is not None],
        css=Markup(css.read_text(encoding="utf-8")),
    )
    target = root / "index.html"
    target.write_text(text + "\n", encoding="utf-8")
    return target


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.results_index")
    parser.add_argument("root", nargs="?", type=Path, default=results_data.RESULTS)
    options = parser.parse_args(argv)
    try:
        print(f"wrote {make_index(options.root)}")
    except AutoselError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
