"""Which points of a backend's parameter space to try: all of a small one, a sample of a large one.

A point that the space's constraint refuses is never tried; its reason is kept. The default comes
first, so that a budget of one still measures what the backend would do by itself, then known-good
points, and one of each design that the space has; then either every other legal point in the
space's own order or, when they are more than the budget, the proposals of Optuna's tree-structured
Parzen estimator (Bergstra et al., "Algorithms for Hyper-Parameter Optimization", 2011); in a space
of blocks, neighbours of the best point so far. Of several designs the fastest is searched, and the
next one only where that is used up. The same space, seed and outcomes give the same points.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autosel.core import Params, Reason, Scalar
from autosel.errors import AutoselError, field_error
from autosel.interfaces import Space
from autosel.records import to_json

Point = dict[str, Scalar]

#: Spaces with more combinations than this are not listed to see how many of them are legal: each
#: takes 5 to 15 us to judge, in every search anew.
LISTED = 2_000
#: Points drawn before a space counts as used up.
DRAWS = 10_000
#: Parameters of a block that a neighbour differs in, at most.
CHANGES = 2
#: Proposals in a row without a new legal point, after which one is drawn at random.
PATIENCE = 20
#: Random points before the estimator has enough to go by.
STARTUP = 10


@dataclass(frozen=True, slots=True)
class Tried:
    """An evaluated point; ``value`` is None when it failed."""

    params: Point
    value: float | None


@dataclass(frozen=True, slots=True)
class Skipped:
    """A point that was not evaluated, and why."""

    params: Point
    reason: Reason


@dataclass(frozen=True, slots=True)
class Found:
    """What a search evaluated, in order, and what it left out (the illegal points it met)."""

    tried: tuple[Tried, ...]
    skipped: tuple[Skipped, ...]


def first_points(
    space: Space, budget: int, seed: int = 0, seeds: Sequence[Params] = ()
) -> list[Point]:
    """What a :class:`Search` asks for at first, as far as no answer changes it.

    A failure does change what comes after it, so these are what to prepare for and no promise.
    Which of several designs is the fastest is an answer too.
    """
    search = Search(space, budget, seed, seeds)
    most = search.known if space.rivals else STARTUP
    found: list[Point] = []
    while len(found) < most and (params := search.ask()) is not None:
        found.append(params)
        search.tell(1.0)
    return found


class Search:
    """At most ``budget`` legal points of ``space``, each once.

    :meth:`ask` for a point, :meth:`tell` what it gave, until None.

    seeds  points to try early, such as a neighbour's best; parameters they leave out are the
           default's
    known  how many points come first whatever is told: defaults and seeds
    """

    def __init__(
        self, space: Space, budget: int, seed: int = 0, seeds: Sequence[Params] = ()
    ) -> None:
        if budget < 1:
            raise AutoselError(field_error("search", "budget", budget, "at least 1"))
        self._tried: list[Tried] = []
        self._skipped: dict[str, Skipped] = {}
        self.known = 0
        self._walk = self._points(space, budget, seed, seeds)
        self._next = next(self._walk, None)
        self._asked = False

    def ask(self) -> Point | None:
        """The next point to evaluate, or None at the end; the same one until it is told."""
        self._asked = self._next is not None
        return dict(self._next) if self._next is not None else None

    def tell(self, value: float | None) -> None:
        """The microseconds of the point asked for; None, NaN or infinity when it failed."""
        if not self._asked or self._next is None:
            raise AutoselError(field_error("search", "tell", "no open point", "ask() before"))
        value = None if value is None or not math.isfinite(value) else float(value)
        self._tried.append(Tried(self._next, value))
        self._asked = False
        try:
            self._next = self._walk.send(value)
        except StopIteration:
            self._next = None

    @property
    def found(self) -> Found:
        return Found(tuple(self._tried), tuple(self._skipped.values()))

    def _points(
        self, space: Space, budget: int, seed: int, seeds: Sequence[Params]
    ) -> Generator[Point, float | None, None]:
        """Yields points and is sent their values; stops at the budget."""
        designs = space.designs
        early = self._early(designs, seeds)
        self.known = len(early)
        grids = [self._listed(design) for design in designs]
        if all(points is not None for points in grids):
            listed = itertools.chain.from_iterable(points or () for points in grids)
            points = list(_unique([*(point for _, point in early), *listed]))
            if len(points) <= budget:
                for point in points:
                    yield point
                return
        tried: list[list[Tried]] = [[] for _ in designs]
        for number, point in early[:budget]:
            tried[number].append(Tried(point, (yield point)))
        bests = [min(map(_value, points), default=math.inf) for points in tried]
        left = budget - len(early[:budget])
        for number in sorted(range(len(bests)), key=bests.__getitem__):
            if left == 0:
                return
            design, before = designs[number], len(tried[number])
            walk = self._walked if design.blocks else self._sampled
            yield from walk(design, left, seed, tried[number], grids[number])
            left -= len(tried[number]) - before

    def _early(self, designs: Sequence[Space], seeds: Sequence[Params]) -> list[tuple[int, Point]]:
        """Points to begin with, each with the number of its design: the space's own one and the
        first seed, then of each design without a point its first seed or else its default, then
        the other seeds. So a small budget sees what is known to be good and every design."""
        wished: list[tuple[int, Point]] = []
        for seed in seeds:
            found = [self._completed(design, seed) for design in designs]
            had = [(n, point) for n, point in enumerate(found) if isinstance(point, dict)]
            if had:
                wished.append(had[0])
            elif isinstance(found[0], Reason):
                self._skip(dict(seed), found[0])
        order = [(0, dict(designs[0].default)), *wished[:1]]
        for number, design in enumerate(designs):
            if all(number != has for has, _ in order):
                own = (point for has, point in wished if has == number)
                order.append((number, next(own, dict(design.default))))
        order += wished[1:]
        legal = [(n, p) for n, p in order if self._refusal(designs[n], p) is None]
        return list({to_json(point): (number, point) for number, point in legal}.values())

    def _sampled(
        self,
        space: Space,
        budget: int,
        seed: int,
        tried: list[Tried],
        listed: list[Point] | None,
    ) -> Generator[Point, float | None, None]:
        """The estimator's proposals, ``budget`` at most, each added to the design's ``tried``."""
        sampler = _Sampler(space, seed)
        for known in tried:
            sampler.learn(known.params, known.value)
        seen = {to_json(known.params) for known in tried}
        rng = random.Random(seed)
        for _ in range(budget):
            trial, found = self._proposal(space, sampler, seen)
            if found is None:
                found = self._drawn(space, listed, seen, rng)
            if found is None:
                return
            seen.add(to_json(found))
            value = yield found
            tried.append(Tried(found, value))
            if trial is None:
                sampler.learn(found, value)
            else:
                sampler.tell(trial, value)

    def _walked(
        self,
        space: Space,
        budget: int,
        seed: int,
        tried: list[Tried],
        listed: list[Point] | None,
    ) -> Generator[Point, float | None, None]:
        """Neighbours of the best point, of one block after the other; as :meth:`_sampled`."""
        blocks = [[n for n in names if len(space.choices.get(n, ())) > 1] for names in space.blocks]
        blocks = [names for names in blocks if names]
        rng, seen = random.Random(seed), {to_json(known.params) for known in tried}
        start = Tried(dict(space.default), None)
        for turn in range(budget):
            found = None
            best = min(tried, key=_value, default=start)
            best = start if best.value is None else best
            if blocks:
                block = blocks[turn % len(blocks)]
                found = self._neighbour(space, best.params, block, seen, rng)
            if found is None:
                found = self._drawn(space, listed, seen, rng)
            if found is None:
                return
            seen.add(to_json(found))
            tried.append(Tried(found, (yield found)))

    def _neighbour(
        self, space: Space, best: Point, block: Sequence[str], seen: set[str], rng: random.Random
    ) -> Point | None:
        """A new legal point that differs from ``best`` in few parameters of ``block``."""
        for _ in range(PATIENCE):
            point = dict(best)
            for name in rng.sample(block, min(len(block), rng.randint(1, CHANGES))):
                point[name] = rng.choice([v for v in space.choices[name] if v != best[name]])
            if to_json(point) not in seen and self._refusal(space, point) is None:
                return point
        return None

    def _proposal(
        self, space: Space, sampler: _Sampler, seen: set[str]
    ) -> tuple[Any, Point | None]:
        """A legal point of the sampler's that is new, with its trial; nothing when it is stuck."""
        for _ in range(PATIENCE):
            trial, point = sampler.ask()
            reason = self._refusal(space, point)
            if reason is None and to_json(point) not in seen:
                return trial, point
            sampler.discard(trial, illegal=reason is not None)
        return None, None

    def _drawn(
        self, space: Space, listed: list[Point] | None, seen: set[str], rng: random.Random
    ) -> Point | None:
        """A new legal point at random, or None when none is left or none could be hit."""
        if listed is not None:
            left = [point for point in listed if to_json(point) not in seen]
            return rng.choice(left) if left else None
        for _ in range(DRAWS):
            drawn = {name: rng.choice(values) for name, values in space.choices.items()}
            point = {**space.default, **drawn}
            if to_json(point) not in seen and self._refusal(space, point) is None:
                return point
        return None

    def _listed(self, space: Space) -> list[Point] | None:
        """Every legal point of the grid, or None when it is too large to list."""
        if math.prod(map(len, space.choices.values())) > LISTED:
            return None
        grid = itertools.product(*space.choices.values())
        points = ({**space.default, **dict(zip(space.choices, v, strict=True))} for v in grid)
        return list(_unique([p for p in points if self._refusal(space, p) is None]))

    def _refusal(self, space: Space, point: Point) -> Reason | None:
        reason = space.constraint(point)
        if reason is not None:
            self._skip(point, reason)
        return reason

    def _completed(self, space: Space, seed: Params) -> Point | Reason:
        """A seed with the default's other parameters, or why this space does not have it."""
        for name, value in seed.items():
            allowed = space.choices.get(name, (space.default.get(name),))
            if name not in {**space.choices, **space.default}:
                return Reason("parameter", name, _names(space))
            if value not in allowed and value != space.default.get(name):
                return Reason(name, str(value), "one of " + _texts(allowed))
        return {**space.default, **seed}

    def _skip(self, point: Point, reason: Reason) -> None:
        self._skipped.setdefault(to_json(point), Skipped(point, reason))


class _Sampler:
    """Optuna's estimator over the positions of values in ``choices``.

    Positions and not values, so that values of any type work. Where the values are numbers in
    order, nearby positions are nearby settings, which the estimator makes use of.
    """

    def __init__(self, space: Space, seed: int) -> None:
        import optuna

        self._optuna = optuna
        self._space = space
        self._choices = {n: v for n, v in space.choices.items() if len(v) > 1}
        self._distributions = {n: self._distribution(v) for n, v in self._choices.items()}
        with quiet(optuna):
            self._study = optuna.create_study(
                sampler=optuna.samplers.TPESampler(
                    seed=seed, n_startup_trials=STARTUP, multivariate=True
                )
            )

    def _distribution(self, values: tuple[Scalar, ...]) -> Any:
        if len(values) > 2 and _ordered(values):
            return self._optuna.distributions.IntDistribution(0, len(values) - 1)
        return self._optuna.distributions.CategoricalDistribution(range(len(values)))

    def ask(self) -> tuple[Any, Point]:
        with quiet(self._optuna):
            trial = self._study.ask(self._distributions)
        fixed = {name: values[0] for name, values in self._space.choices.items()}
        chosen = {name: self._choices[name][i] for name, i in trial.params.items()}
        return trial, {**self._space.default, **fixed, **chosen}

    def tell(self, trial: Any, value: float | None) -> None:
        state = self._optuna.trial.TrialState
        with quiet(self._optuna):
            self._study.tell(trial, value, state=state.FAIL if value is None else state.COMPLETE)

    def discard(self, trial: Any, illegal: bool) -> None:
        """Illegal points count as bad ones, so that their region is left; repeats do not count."""
        state = self._optuna.trial.TrialState
        with quiet(self._optuna):
            self._study.tell(trial, state=state.PRUNED if illegal else state.FAIL)

    def learn(self, point: Point, value: float | None) -> None:
        """Tell of a point that this sampler did not propose, if it lies on the grid."""
        try:
            places = {n: values.index(point[n]) for n, values in self._choices.items()}
        except (KeyError, ValueError):  # another design's, or off the grid
            return
        if value is None:
            return
        trial = self._optuna.trial.create_trial(
            params=places, distributions=self._distributions, value=value
        )
        with quiet(self._optuna):
            self._study.add_trial(trial)


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Optuna reports each study on stderr; the caller's setting is put back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _ordered(values: tuple[Scalar, ...]) -> bool:
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return False
    pairs = list(itertools.pairwise(values))
    return all(a < b for a, b in pairs) or all(a > b for a, b in pairs)  # type: ignore[operator]


def _unique(points: Sequence[Point]) -> Iterator[Point]:
    return iter({to_json(point): point for point in points}.values())


def _value(tried: Tried) -> float:
    return math.inf if tried.value is None else tried.value


def _texts(values: Sequence[Scalar]) -> str:
    return ", ".join(map(str, values))


def _names(space: Space) -> str:
    return "one of " + ", ".join({**space.choices, **space.default}) if space.choices else "none"
