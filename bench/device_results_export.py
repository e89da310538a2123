"""Writes what ships of a database into ``results/DEVICE/``.

======================= ========================================================================
``packs/NAME.json``     a decision pack a layer and routing: the built-in tier of results
``samples.csv.xz``      every measurement with its raw samples (:mod:`bench.device_results_tables`)
``decisions.csv``       what was chosen at each token count, and what vLLM's order would take
``environment.json``    devices, software, dates and the commands that measured each layer
======================= ========================================================================

The database stays as it is, and the same database gives the same bytes.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import autosel
from autosel.atomic import atomic_file
from autosel.errors import AutoselError, PackError, field_error
from autosel.evidence import Evidence, gather_all
from autosel.packs import content
from autosel.packs.build import line
from autosel.packs.model import Pack
from autosel.store import Store, snapshot
from autosel.sweep_words import sweep_command
from bench import device_results_packs, device_results_tables
from bench.results_layers import named, slug, with_best_ceilings

ENVIRONMENT = "environment.json"
SAMPLES, DECISIONS, PACKS = "samples.csv.xz", "decisions.csv", "packs"


@dataclass(frozen=True)
class Exported:
    """What was written, for the summary."""

    layers: int
    packs: int
    left_out: tuple[str, ...]


def export(db: Path, folder: Path, *, device: str | None = None) -> Exported:
    """Write everything of ``db`` that ships into ``folder``.

    device  part of a name, where the database holds several devices; AutoselError where it does
            and none is named, for nothing measured, and for a place that cannot be written

    Of a layer that was measured with several versions of the software the newest ships.
    """
    with snapshot(db) as store:
        found = chosen(store, device, str(db))
        left_out: list[str] = []
        packs: dict[str, Pack] = {}
        packed = set()
        for one in found:
            if (one.problem, one.routing) in packed:
                continue  # a pack has every way of timing
            packed.add((one.problem, one.routing))
            try:
                packs[slug(one.label)] = device_results_packs.pack(store, one)
            except PackError as error:
                left_out.append(f"no pack for {one.label}: {error}")
    try:
        (folder / PACKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoselError(f"{folder}: cannot be made: {error.strerror or error}") from None
    for stale in _written_before(folder) - packs.keys():
        (folder / PACKS / f"{stale}.json").unlink(missing_ok=True)
    for name, pack in packs.items():
        content.write(pack, folder / PACKS / f"{name}.json")
    text = device_results_tables.samples_text(found).encode()
    _write(folder / SAMPLES, lzma.compress(text, preset=6))
    _write(
        folder / DECISIONS, device_results_tables.decisions_text(with_best_ceilings(found)).encode()
    )
    facts = environment(found, folder.name)
    _write(folder / ENVIRONMENT, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
    for words in left_out:
        print(words, file=sys.stderr)
    print(
        f"wrote {len(found)} layers to {folder}: {len(packs)} packs ("
        f"{_kilobytes(folder.glob(PACKS + '/*.json'))}), samples {_kilobytes([folder / SAMPLES])}"
    )
    return Exported(len(found), len(packs), tuple(left_out))


def chosen(store: Store, device: str | None, where: str) -> list[Evidence]:
    """The layers that ship, by name, with labels that differ."""
    hot = [one for one in gather_all(store, timing={"cache": "hot"}) if one.correct]
    timed_hot = {(one.problem, one.device, one.routing) for one in hot}
    everything = hot + [
        one
        for one in gather_all(store)
        # What failed before it was timed belongs to every way of timing.
        if one.correct or (one.problem, one.device, one.routing) not in timed_hot
    ]
    names = sorted({one.device.name for one in everything})
    wanted = [name for name in names if device is None or device.lower() in name.lower()]
    if len(wanted) != 1:
        found = ", ".join(wanted or names) or "nothing measured"
        expected = f"one with {device!r} in its name" if device else "one (--stored-device)"
        raise AutoselError(field_error(where, "devices", found, expected))
    newest: dict[Any, Evidence] = {}
    for one in everything:
        if one.device.name == wanted[0]:
            key = (one.problem, one.routing, one.timing)
            known = newest.get(key)
            if known is None or known.newest < one.newest:
                newest[key] = one
    # Sorted before and after: names that would be alike are numbered in one order.
    order = sorted(newest.values(), key=lambda one: (one.label, one.problem.key, one.routing))
    return sorted(named(order), key=lambda one: one.label)


def environment(found: Sequence[Evidence], folder: str) -> dict[str, Any]:
    """Machines with their software, layers with their commands, and the commands of the folder."""
    machines = list(dict.fromkeys(one.device for one in found))
    layers = {
        slug(one.label): {
            "label": one.label,
            "target": one.target,
            "routing": one.routing,
            "machine": machines.index(one.device),
            "tokens": list(one.token_counts),
            "first": min((sweep.started for sweep in one.sweeps), default=one.newest),
            "last": one.newest,
            "ceilings": asdict(one.ceilings) if one.ceilings else None,
            "seed": one.seed,
            "command": line(sweep_command(one)),
        }
        for one in found
    }
    return {
        "autosel": autosel.__version__,
        "machines": [machine.to_dict() for machine in machines],
        "layers": layers,
        "commands": [
            f"python -m bench.device_results sweep results/{folder}/sweeps.txt --db FILE",
            f"python -m bench.device_results export --db FILE -o results/{folder}",
            "scripts/results-index",
        ],
    }


def read_environment(folder: Path) -> dict[str, Any]:
    """The file that :func:`export` wrote, empty where there is none; AutoselError for another."""
    place = folder / ENVIRONMENT
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise AutoselError(f"{place}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not isinstance(found.get("layers"), dict):
        raise AutoselError(field_error(str(place), "layers", "nothing", "what export writes"))
    return found


def _written_before(folder: Path) -> set[str]:
    """Packs of an earlier export: others in the folder are not touched."""
    return {slug(name) for name in read_environment(folder).get("layers", {})}


def _write(path: Path, data: bytes) -> None:
    with atomic_file(path) as partial:
        partial.write_bytes(data)


def _kilobytes(paths: Iterable[Path]) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 1e3:,.0f} kB"
