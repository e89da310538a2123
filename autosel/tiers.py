"""The tiers of results: everything that may answer for a layer here, in the order it is asked.

======== =========================================================== =====================
tier     place                                                       may be written by
======== =========================================================== =====================
user     the user's database, then packs installed beside it          sweeps, `pack install`
site     ``$AUTOSEL_SITE_DB``, then packs installed beside it         the site's administrator
model    ``autosel-pack.json`` in the model's folder                  whoever ships the model
built-in packs that ship with autosel (``results/``)                  nobody
======== =========================================================== =====================

The first tier that answers for a token count counts; the next ones fill what it leaves open. What
a database says counts where its key is this machine's to the last field. What a pack says counts
where it is graded exact, or compatible and proven here (:mod:`autosel.packs.grade`,
:mod:`autosel.packs.canary`); all else is only told. This is the one place that decides so, for
the layer, ``explain`` and the API alike. Nothing is written and nothing runs here.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from autosel import identity, sqlite_file
from autosel.buckets import newest_cover
from autosel.core import Candidate, Decision, Device, Measurement, Problem, TokenBucket
from autosel.next_best import instead, without
from autosel.packs import canary_results, library, places
from autosel.packs.grade import Graded, bystanders
from autosel.packs.grade import grade as grade_of
from autosel.packs.model import Entry, Pack
from autosel.records import Timing
from autosel.rows import StoreWarning, same_mode
from autosel.store import Database, Store, opened_database
from autosel.storefile import Opened
from autosel.tables import Tables

Tier = Literal["user", "site", "model", "built-in"]
#: Cold caches stand for a model at work: other layers' weights fill them between two calls.
COLD: Timing = (("cache", "cold"),)
#: Who failed here, by the user's database, and at which token count.
Failed = set[tuple[Candidate, int]]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an answer comes from and what it is worth here.

    ``proven``: it may decide. ``note`` says what is missing where it may not.
    """

    tier: Tier
    place: str
    graded: Graded = field(default_factory=lambda: Graded("exact"))
    proven: bool = True
    decided: str = ""
    note: str = ""
    sha256: str = ""

    @property
    def text(self) -> str:
        """``built-in results (…/h200.json, compatible)``; the user's own database needs no word."""
        name = "pack of the model" if self.tier == "model" else self.tier
        return f"{name} results ({self.place}, {self.graded.grade})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return {
            "tier": self.tier,
            "place": self.place,
            "grade": self.graded.grade,
            "differences": [asdict(item) for item in self.graded.differences],
            "proven": self.proven,
            "note": self.note,
            "decided": self.decided,
            "sha256": self.sha256 or None,
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """What one place says about one layer: decisions sorted by bucket, and measurements.

    Measurements of packs without samples have no times; decisions hold without them.
    """

    origin: Origin
    decisions: tuple[Decision, ...]
    measurements: tuple[Measurement, ...] = ()
    entry: Entry | None = field(default=None, repr=False)

    def illegal(self, candidate: Candidate, device: Device, num_tokens: int) -> bool:
        """Whether a pack names a candidate that must not run; databases hold what ran here."""
        if self.entry is None:
            return False
        return bool(library.why_illegal(candidate, self.entry.problem, device, num_tokens))

    def at(self, num_tokens: int) -> Decision | None:
        return next((d for d in self.decisions if num_tokens in d.bucket), None)


@dataclass(frozen=True, slots=True)
class Found:
    """The decision for a token count and where it comes from."""

    decision: Decision
    answer: Answer

    @property
    def origin(self) -> Origin:
        return self.answer.origin


@dataclass(frozen=True, slots=True)
class Answers:
    """Everything there is about one layer. Answers stand in the order of the tiers.

    usable    may decide
    unproven  compatible, and the check here has not run or did not pass: ``origin.note``
    foreign   made on something else; the one that differs in fewest fields first
    """

    usable: tuple[Answer, ...]
    unproven: tuple[Answer, ...] = ()
    foreign: tuple[Answer, ...] = ()

    def find(self, num_tokens: int) -> Found | None:
        """What decides for ``num_tokens`` tokens, or None."""
        return next(_at(self.usable, num_tokens), None)

    def told(self, num_tokens: int) -> tuple[Found, ...]:
        """What does not decide and is worth telling: unproven answers, then foreign ones."""
        return tuple(_at((*self.unproven, *self.foreign), num_tokens))

    def decisions(self) -> tuple[Decision, ...]:
        """The whole table: each tier's decisions where no tier before it has one."""
        return newest_cover(d for answer in self.usable for d in answer.decisions)

    def seeds(self, backend: str, num_tokens: int) -> list[tuple[dict[str, Any], int]]:
        """Parameters to start a search of ``backend`` from: what won elsewhere, each once, with
        the token count at which it did."""
        seen: dict[Candidate, int] = {}
        for found in _at((*self.usable, *self.unproven, *self.foreign), num_tokens):
            for candidate in (found.decision.winner, found.decision.runner_up):
                if candidate is not None and candidate.backend == backend:
                    seen.setdefault(candidate, found.decision.bucket.measured)
        return [(candidate.params_dict, measured) for candidate, measured in seen.items()]


class Tiers:
    """The open tiers; get one from :func:`open_tiers`."""

    def __init__(
        self, store: Store, site: Store | None = None, model: str | Path | None = None
    ) -> None:
        self.store = store
        self._site = site
        self._model = model

    @property
    def places(self) -> Iterator[tuple[Tier, Path]]:
        """Every pack that is looked at, in order."""
        for path in places.installed(self.store.path):
            yield "user", path
        for path in places.installed(places.site_database()):
            yield "site", path
        for path in places.beside(self._model):
            yield "model", path
        for path in places.built_in():
            yield "built-in", path

    def answers(
        self,
        problem: Problem,
        device: Device,
        *,
        routing: str = "uniform",
        timing: Timing = COLD,
        allow_a8: bool = False,
    ) -> Answers:
        """What all tiers say about this layer, routing and way of timing on ``device``.

        A pack that must not be used costs one PackWarning. A candidate that the user's database
        knows to fail here is not chosen from any other tier.
        """
        known = bool(device.name.strip())  # nothing is about an unknown device
        wish = _Wish(problem, device, routing, timing, allow_a8)
        usable, unproven, foreign = [], [], []
        failed: Failed = set()
        for tier, store in (("user", self.store), ("site", self._site)):
            if store is not None and known:
                answer = wish.of_store(tier, store, failed)  # type: ignore[arg-type]
                usable.append(answer)
                failed |= {
                    (m.candidate, m.num_tokens) for m in answer.measurements if m.status != "ok"
                }
        for tier, path in self.places:
            for answer in self._of_pack(tier, path, wish, failed):
                if answer.origin.proven:
                    usable.append(answer)
                elif answer.origin.graded.grade == "compatible":
                    unproven.append(answer)
                else:
                    foreign.append(answer)
        order = ("user", "site", "model", "built-in")
        usable.sort(key=lambda answer: order.index(answer.origin.tier))
        foreign.sort(key=lambda answer: len(answer.origin.graded.differences))
        return Answers(tuple(usable), tuple(unproven), tuple(foreign))

    def entries(self) -> list[tuple[Tier, identity.Entry]]:
        """What every tier holds, as the store describes it: for naming the nearest."""
        found: list[tuple[Tier, identity.Entry]] = [("user", e) for e in self.store.entries()]
        if self._site is not None:
            found += [("site", entry) for entry in self._site.entries()]
        for tier, path in self.places:
            pack = library.load(path, signed=tier != "built-in")
            found += [(tier, _described(entry)) for entry in pack.entries] if pack else []
        return found

    def _of_pack(self, tier: Tier, path: Path, wish: _Wish, failed: Failed) -> Iterator[Answer]:
        # Installed and built-in packs are in canonical form, so most need no parsing.
        if tier != "model" and not library.mentions(path, wish.problem):
            return
        pack = library.load(path, signed=tier != "built-in")
        for entry in pack.entries if pack else ():
            if wish.matches(entry):
                assert pack is not None
                yield self._graded(tier, path, pack, entry, wish, failed)

    def _graded(
        self,
        tier: Tier,
        path: Path,
        pack: Pack,
        entry: Entry,
        wish: _Wish,
        failed: Failed,
    ) -> Answer:
        graded = grade_of(
            entry.source,
            wish.device,
            shipped=tier == "built-in",
            bystanders=bystanders(entry),
        )
        proven, note = graded.grade == "exact", ""
        kept = [m.row for m in entry.measured if m.row.times_us or m.row.status != "ok"]
        rows = _standing(kept, failed)
        if graded.grade == "compatible":
            result = canary_results.find(self.store.path, pack.sha256, entry, wish.device)
            proven = result is not None and result.passed
            note = (
                result.why
                if result
                else "not checked on this machine yet (autosel pack check does it)"
            )
        elif graded.grade == "foreign":
            note = "made on something else: " + "; ".join(map(str, graded.differences))
        if proven:
            note = wish.why_illegal(entry)
            proven = not note
        decisions = wish.allowed(entry, rows, failed)
        origin = Origin(tier, str(path), graded, proven, entry.decided, note, pack.sha256)
        return Answer(origin, decisions, rows, entry)


@dataclass(frozen=True)
class _Wish:
    """What is looked for."""

    problem: Problem
    device: Device
    routing: str
    timing: Timing
    allow_a8: bool

    def of_store(self, tier: Tier, store: Store, failed: Failed) -> Answer:
        found = store.measurements(self.problem, self.device, self.routing, timing=self.timing)
        rows = _standing(found, failed)
        stored = store.stored_decisions(
            self.problem, self.device, self.routing, timing=self.timing, allow_a8=self.allow_a8
        )
        newest = max((item.created for item in stored), default="")
        place = str(store.path or (places.site_database() if tier == "site" else "memory"))
        decisions = [self._fit(item.decision, rows, failed) for item in stored]
        usable = tuple(d for d in decisions if d is not None)
        return Answer(Origin(tier, place, decided=newest), usable, rows)

    def matches(self, entry: Entry) -> bool:
        return (
            entry.problem == self.problem
            and entry.routing == self.routing
            and same_mode(self.timing, entry.timing)
        )

    def allowed(
        self,
        entry: Entry,
        rows: Sequence[Measurement],
        failed: Failed,
    ) -> tuple[Decision, ...]:
        """Decisions with the next best where a winner is not allowed, or failed here before."""
        found = [self._fit(d, rows, failed, claimed=True) for d in entry.decisions]
        return tuple(d for d in found if d is not None)

    def _fit(
        self, d: Decision, rows: Sequence[Measurement], failed: Failed, *, claimed: bool = False
    ) -> Decision | None:
        """``d`` without those who failed here; ``claimed`` by a pack, so others must be legal."""
        gone = {c for c, m in failed if m in d.bucket or m == d.bucket.measured}
        d = without(d, gone) if gone else d

        def banned(candidate: Candidate) -> bool:
            if candidate in gone:
                return True
            return claimed and candidate != d.winner and bool(self._illegal(candidate, d.bucket))

        return instead(d, rows, banned, allow_a8=self.allow_a8)

    def why_illegal(self, entry: Entry) -> str:
        """Why a chosen or planned candidate is no point of its backend's space; "" where all are.

        A pack that claims this very machine and names what its backend would never propose is not
        believed in anything.
        """
        named = [(d.winner, d.bucket) for d in entry.decisions]
        for item in entry.plan.buckets if entry.plan else ():
            named += [(item.candidate, item.bucket), (item.best, item.bucket)]
        reasons = (self._illegal(candidate, bucket) for candidate, bucket in named)
        return next((reason for reason in reasons if reason), "")

    def _illegal(self, candidate: Candidate, bucket: TokenBucket) -> str:
        return library.why_illegal(candidate, self.problem, self.device, bucket.measured)


def _standing(rows: Iterable[Measurement], failed: Failed) -> tuple[Measurement, ...]:
    """Without what another place measured as right and failed here since."""
    return tuple(m for m in rows if m.status != "ok" or (m.candidate, m.num_tokens) not in failed)


def _at(answers: Iterable[Answer], num_tokens: int) -> Iterator[Found]:
    for answer in answers:
        decision = answer.at(num_tokens)
        if decision is not None:
            yield Found(decision, answer)


def _described(entry: Entry) -> identity.Entry:
    counts = {m.row.num_tokens for m in entry.measured}
    counts |= {d.bucket.measured for d in entry.decisions}
    return identity.Entry(
        entry.problem,
        entry.device,
        entry.routing,
        tuple(sorted(counts)),
        len(entry.decisions),
        entry.decided,
    )


@contextmanager
def open_tiers(db: Database = None, model: str | Path | None = None) -> Iterator[Tiers]:
    """The tiers with ``db`` (the user's database when left out) as the first.

    ``model`` is a model's folder, where a pack may lie.
    """
    with ExitStack() as stack:
        store = stack.enter_context(opened_database(db))
        site = _open_site(store)
        if site is not None:
            stack.enter_context(site)
        yield Tiers(store, site, model)


def _open_site(store: Store) -> Store | None:
    """A copy of the site's database in memory, so that reading it never writes to it."""
    path = places.site_database()
    try:
        if not path.is_file() or path == store.path:
            return None
        return Store(Opened(Tables(sqlite_file.read_copy(path), None), None))
    except (sqlite3.Error, OSError, sqlite_file.UnusableError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        warnings.warn(f"site database {path} not used: {reason}", StoreWarning, stacklevel=4)
        return None


def mode(timing: Mapping[str, Any] | None) -> Timing:
    """A way of timing as the tiers take it; cold caches when left out."""
    return tuple(sorted(timing.items())) if timing else COLD
