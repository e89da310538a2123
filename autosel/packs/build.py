"""Makes packs from what a store holds."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import autosel
from autosel import records, samples
from autosel.buckets import buckets, newest_cover
from autosel.core import Decision, Device, Measurement, Problem, TokenBucket
from autosel.decide import NothingUsable, decide
from autosel.errors import AutoselError, PackError, field_error
from autosel.packs.content import sealed
from autosel.packs.fields import MAX_NAME, MAX_TEXT
from autosel.packs.model import Entry, Measured, Model, ModelLayers, Pack, Source, Undecided
from autosel.packs.writing import problem_data
from autosel.rows import StoredDecision, same_mode
from autosel.store import Store

_Key = tuple[Problem, Device, str, str]


def model(
    name: str,
    kind: str,
    layers: Iterable[tuple[Problem, Sequence[int]]],
    *,
    model_type: str | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Model:
    """A model by its layers (problem and numbers) and its checkpoint's quantisation settings.

    Settings are hashed as the config files have them, whatever a strict reader would say to them.
    """
    found = tuple(ModelLayers(problem, tuple(indices)) for problem, indices in layers)
    shapes = [[problem_data(layer.problem), list(layer.indices)] for layer in found]
    settings = None if quantization is None else records.to_json(_finite(quantization))
    return Model(
        plain_name(name),
        kind,
        None if model_type is None else plain_name(model_type),
        None if settings is None else _sha256(settings),
        _sha256(records.to_json(shapes)),
        found,
    )


def folder_name(path: str | Path) -> str:
    """The name of a model folder; that of the repository for a snapshot in Hugging Face's cache."""
    place = Path(path).resolve()
    if place.parent.name == "snapshots" and place.parents[1].name.startswith("models--"):
        return place.parents[1].name.removeprefix("models--")
    return place.name


def plain_name(text: str) -> str:
    """``text`` as a name that a pack may hold: never a path."""
    word = re.sub(r"[^A-Za-z0-9_.:+-]+", "_", text)[:MAX_NAME]
    word = re.sub(r"\.\.+", ".", word)
    return word if re.match(r"\w", word, re.ASCII) else f"_{word}"[:MAX_NAME]


def build(
    store: Store,
    about: Model,
    *,
    device: Device | None = None,
    routing: str | None = None,
    allow_a8: bool = False,
    with_samples: bool = False,
    command: str = "",
) -> Pack:
    """A sealed pack of what ``store`` has about the layers of ``about``.

    device        only results of exactly this device and its software; None: of every device
    routing       only this kind; None: every kind
    allow_a8      may winners quantise activations to 8 bits
    with_samples  keep raw samples, so that readers can decide again; else their quantiles

    Raises PackError when nothing was decided for any layer.
    """
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    commit = checkout_commit()
    entries = []
    for problem in dict.fromkeys(layer.problem for layer in about.layers):
        rows = store.measurements(problem, device, routing)
        stored = store.stored_decisions(problem, device, routing, allow_a8=allow_a8)
        for key, decided in _grouped(stored, rows).items():
            made_on = key[1]
            source = Source(made_on, autosel.__version__, commit, created, line(command))
            found = _entry(decided, rows, key, source, allow_a8, with_samples)
            if found.decisions:
                entries.append(_proven_and_planned(found, store, allow_a8))
    if not entries:
        on = f"on {device.name} with its software" if device else "on any device"
        expected = f"at least one for {about.name} {on}; autosel sweep makes them"
        raise PackError(field_error("pack", "decisions stored", "none", expected))
    return sealed(Pack((about,), tuple(entries)))


def _proven_and_planned(entry: Entry, store: Store, allow_a8: bool) -> Entry:
    """``entry`` with the certificates of its winners and runners-up, and the plan that holds."""
    wanted = set(entry.candidates)
    certificates = tuple(
        replace(certificate, reason=line(certificate.reason))
        for certificate in store.certificates(entry.problem, entry.device)
        if certificate.candidate in wanted
    )
    timing = tuple(entry.timing.items())
    plans = store.plans(entry.problem, entry.device, entry.routing, timing=timing)
    plan = plans[-1].plan if plans else None
    if plan is not None and not allow_a8 and any(b.accuracy != "exact" for b in plan.buckets):
        plan = None
    return replace(entry, certificates=certificates, plan=plan)


def _grouped(
    stored: Iterable[StoredDecision], rows: Iterable[Measurement]
) -> dict[_Key, list[StoredDecision]]:
    """Decisions by layer, device, routing and way of timing; keys that only rows have as well."""
    found: dict[_Key, list[StoredDecision]] = defaultdict(list)
    for item in stored:
        d = item.decision
        found[(d.problem, item.device, d.routing, records.to_json(dict(item.mode)))].append(item)
    for row in rows:
        if row.status == "ok":
            mode = records.timing_mode(row.timing)
            mode.pop("graph", None)  # a candidate's own: rivals may differ in it
            key = (row.problem, row.device, row.routing)
            known = (json.loads(k[3]) for k in found if k[:3] == key)
            if not any(same_mode(row.timing, other) for other in known):
                found[(*key, records.to_json(mode))] = []
    return found


def _entry(
    decided: Sequence[StoredDecision],
    rows: Sequence[Measurement],
    key: _Key,
    source: Source,
    allow_a8: bool,
    with_samples: bool,
) -> Entry:
    problem, device, routing, text = key
    mode: dict[str, Any] = json.loads(text)
    mine = [
        row
        for row in rows
        if row.device == device and row.routing == routing and same_mode(row.timing, mode)
    ]
    again = _decided_again(mine, allow_a8)
    kept = newest_cover([*(item.decision for item in decided), *again])
    decisions = tuple(_clean_decision(d) for d in kept)
    words = "no candidate could be chosen here"
    return Entry(
        problem=problem,
        source=source,
        routing=routing,
        timing=mode,
        decided=max((item.created for item in decided), default=source.created),
        decisions=decisions,
        undecided=tuple(Undecided(b, words) for b in gaps([d.bucket for d in decisions])),
        measured=tuple(_measured(row, mode, with_samples) for row in mine),
    )


def _decided_again(rows: Sequence[Measurement], allow_a8: bool) -> Iterator[Decision]:
    """What the measurements say by themselves, for the token counts without a stored decision."""
    counts = sorted({row.num_tokens for row in rows})
    for bucket in buckets(counts) if counts else ():
        there = [row for row in rows if row.num_tokens == bucket.measured]
        try:
            found = decide(there, bucket=bucket, allow_a8=allow_a8)
        except AutoselError:  # rows of several ways of timing: nothing to go by
            continue
        if not isinstance(found, NothingUsable):
            yield found


def gaps(found: Sequence[TokenBucket]) -> list[TokenBucket]:
    """Buckets for the token counts from 1 on that sorted, separate buckets leave out."""
    missing = []
    low = 1
    for bucket in found:
        if bucket.low > low:
            missing.append(TokenBucket(low, bucket.low - 1, low))
        if bucket.high is None:
            return missing
        low = bucket.high + 1
    return [*missing, TokenBucket(low, None, low)]


def _measured(row: Measurement, mode: Mapping[str, Any], with_samples: bool) -> Measured:
    clean = replace(row, reason=line(row.reason))
    if row.status != "ok" or not with_samples:
        clean = replace(clean, times_us=(), timing=tuple(sorted(mode.items())))
    return Measured(clean, samples.summary(row))


def _clean_decision(d: Decision) -> Decision:
    rejected = tuple(replace(r, reason=line(r.reason)) for r in d.rejected)
    return replace(d, why=line(d.why), rejected=rejected)


#: An absolute path, which says how somebody's machine is set up: all but its last name.
_FOLDERS = re.compile(r"(?<![\w.:/\\])(?:[A-Za-z]:\\|/)(?:[^\s/\\'\"]+[/\\])+(?=[^\s/\\'\"])")


def line(text: str) -> str:
    """``text`` for a pack: one line of printable characters, without folders, not too long."""
    text = _FOLDERS.sub(".../", " ".join(text.split()))
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return shown if len(shown) <= MAX_TEXT else shown[: MAX_TEXT - 4] + " ..."


def checkout_commit() -> str | None:
    """The commit of the checkout that autosel runs from; None outside of one."""
    root = Path(autosel.__file__).resolve().parents[1]
    if not (root / ".git").exists() or not (root / "pyproject.toml").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    found = done.stdout.strip()
    return found if done.returncode == 0 and re.fullmatch(r"[0-9a-f]{40,64}", found) else None


def _finite(value: Any) -> Any:
    """Published configs hold NaN and Infinity; their texts stand for them in the hash."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
