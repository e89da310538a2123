"""Walking parameter spaces: legality, order, reproducibility."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosel.core import Params, Reason
from autosel.errors import AutoselError
from autosel.interfaces import Space
from autosel.records import to_json
from autosel.search import CHANGES, Search, first_points
from tests.searching import best, walk

SMALL = Space(
    default={"block": 64, "fast": False},
    choices={"block": (16, 32, 64, 128), "fast": (False, True)},
)

#: 16 * 8 * 8 * 4 * 2 = 8192 points; a third of them need too much shared memory.
LARGE = Space(
    default={"m": 64, "n": 64, "k": 64, "stages": 2, "order": "rows", "fixed": 7},
    choices={
        "m": tuple(range(16, 257, 16)),
        "n": tuple(range(32, 257, 32)),
        "k": tuple(range(32, 257, 32)),
        "stages": (1, 2, 3, 4),
        "order": ("rows", "columns"),
        "fixed": (7,),
    },
    constraint=lambda p: (
        Reason("shared memory", str(_memory(p)), "at most 101376") if _memory(p) > 101376 else None
    ),
)


def _memory(p):
    return p["stages"] * p["k"] * (2 * p["m"] + p["n"] // 2)


def landscape(p):
    """A smooth cost with one best corner: m=128, n=192, k=64, stages=3, columns."""
    cost = abs(math.log2(p["m"] / 128)) + abs(math.log2(p["n"] / 192))
    cost += abs(math.log2(p["k"] / 64)) + 0.3 * abs(p["stages"] - 3)
    return 100 + 20 * cost + (10 if p["order"] == "rows" else 0)


class Recorder:
    def __init__(self, value=landscape):
        self.points = []
        self.value = value

    def __call__(self, params):
        self.points.append(dict(params))
        return self.value(params)


def keys(points):
    return [tuple(sorted(p.items(), key=str)) for p in points]


# small spaces ------------------------------------------------------------------------------


def test_a_small_space_is_walked_whole_in_its_order_with_the_default_first():
    seen = Recorder(lambda p: 1.0)
    found = walk(SMALL, 8, seen)
    assert seen.points == list(SMALL)
    assert seen.points[0] == {"block": 64, "fast": False}
    assert len(seen.points) == 8
    assert found.skipped == ()


def test_nothing_to_tune_is_one_point():
    seen = Recorder(lambda p: 1.0)
    walk(Space(), 5, seen)
    assert seen.points == [{}]


def test_failed_points_are_kept_without_a_value():
    values = {16: None, 32: math.nan, 64: math.inf, 128: 9.0}
    found = walk(SMALL, 8, lambda p: values[p["block"]])
    assert len(found.tried) == 8
    assert {t.params["block"] for t in found.tried if t.value is not None} == {128}
    assert {t.value for t in found.tried} == {None, 9.0}


def test_illegal_points_are_skipped_with_both_numbers_and_never_evaluated():
    # Inputs 1344 in groups of 32: a block must divide them and hold 1, 2, 4 or 8 groups.
    def constraint(p):
        groups = p["block"] // 32
        if 1344 % p["block"] or groups not in (1, 2, 4, 8):
            return Reason("block", str(p["block"]), "1, 2, 4 or 8 groups that divide 1344")
        return None

    space = Space({"block": 32}, {"block": (16, 32, 64, 96, 128, 256, 672)}, constraint)
    seen = Recorder(lambda p: 1.0)
    found = walk(space, 100, seen)
    assert [p["block"] for p in seen.points] == [32, 64]
    assert [s.params["block"] for s in found.skipped] == [16, 96, 128, 256, 672]
    assert str(found.skipped[0].reason) == (
        "block: found 16, required 1, 2, 4 or 8 groups that divide 1344"
    )


def test_an_illegal_default_is_reported_and_the_others_are_tried():
    def constraint(p):
        return Reason("bytes", "147456", "at most 101376") if p["block"] > 64 else None

    seen = Recorder(lambda p: 1.0)
    found = walk(Space({"block": 128}, {"block": (128, 64, 32)}, constraint), 9, seen)
    assert [p["block"] for p in seen.points] == [64, 32]
    assert found.skipped[0].params == {"block": 128}
    assert "found 147456, required at most 101376" in str(found.skipped[0].reason)


def test_a_space_without_a_legal_point_evaluates_nothing():
    space = Space({"a": 1}, {"a": (1, 2)}, lambda p: Reason("a", str(p["a"]), "3"))
    found = walk(space, 5, Recorder())
    assert (found.tried, len(found.skipped)) == ((), 2)


def test_values_named_twice_are_tried_once():
    seen = Recorder(lambda p: 1.0)
    walk(Space({"a": 1}, {"a": (1, 1, 2, 2)}), 9, seen)
    assert seen.points == [{"a": 1}, {"a": 2}]


# large spaces ------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 7, 60])
def test_a_budget_is_used_up_on_different_legal_points_with_the_default_first(budget):
    seen = Recorder()
    found = walk(LARGE, budget, seen)
    assert seen.points[0] == LARGE.default
    assert len(seen.points) == len(set(keys(seen.points))) == budget
    for point in seen.points:
        assert LARGE.constraint(point) is None
        assert all(point[name] in values for name, values in LARGE.choices.items())
    assert len(found.tried) == budget


def test_the_same_seed_repeats_and_another_seed_differs():
    runs = []
    for seed in (3, 3, 4):
        seen = Recorder()
        walk(LARGE, 30, seen, seed=seed)
        runs.append(seen.points)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_search_learns_from_what_it_is_told():
    """Against random sampling with the same budget, over several seeds."""
    legal = [p for p in LARGE if LARGE.constraint(p) is None]
    guided, blind = [], []
    for seed in range(5):
        guided.append(best(walk(LARGE, 60, landscape, seed=seed)).value)
        blind.append(min(map(landscape, random.Random(seed).sample(legal, 60))))
    assert sum(guided) / 5 < sum(blind) / 5 - 2
    assert min(map(landscape, legal)) <= min(guided)


def test_failures_do_not_stop_a_large_search():
    def half_fails(p):
        return None if p["m"] > 128 else landscape(p)

    seen = Recorder(half_fails)
    found = walk(LARGE, 40, seen)
    assert len(found.tried) == 40
    assert any(t.value is None for t in found.tried)
    assert best(found).params["m"] <= 128
    assert len(walk(LARGE, 25, lambda p: None).tried) == 25


def test_known_good_points_come_right_after_the_default():
    good = {"m": 128, "n": 192, "k": 64, "stages": 3, "order": "columns"}
    seen = Recorder()
    walk(LARGE, 5, seen, seeds=[good, {"m": 32}, LARGE.default])
    assert seen.points[1] == {**LARGE.default, **good}
    assert seen.points[2] == {**LARGE.default, "m": 32}
    assert len(seen.points) == 5


def test_seeds_of_another_space_are_left_out_with_the_reason():
    seen = Recorder()
    seeds = [{"m": 100}, {"warps": 4}, {"m": 256, "k": 256, "stages": 4}]
    found = walk(LARGE, 3, seen, seeds=seeds)
    reasons = [str(s.reason) for s in found.skipped[:3]]
    assert reasons[0].startswith("m: found 100, required one of 16")
    assert reasons[1].startswith("parameter: found warps, required one of m, n, k")
    assert reasons[2].startswith("shared memory")
    assert len(found.tried) == 3


def test_a_nearly_empty_legal_region_is_still_exhausted():
    """The estimator seldom proposes one of 30 points in 8192; the rest is drawn."""

    def constraint(p):
        legal = p["m"] == 16 and p["k"] == 32 and p["stages"] != 1
        return None if legal else Reason("m", str(p["m"]), "16")

    space = Space({**LARGE.default, "m": 16, "k": 32}, LARGE.choices, constraint)
    seen = Recorder()
    walk(space, 40, seen)
    assert len(set(keys(seen.points))) == 40
    seen = Recorder()
    walk(space, 500, seen)  # 8 * 3 * 2 = 48 legal points
    assert len(set(keys(seen.points))) == len(seen.points) == 48


def test_a_space_too_large_to_list_is_searched_all_the_same():
    space = Space(
        dict.fromkeys("abcdefgh", 0),
        {name: tuple(range(16)) for name in "abcdefgh"},
        lambda p: Reason("a", str(p["a"]), "even") if p["a"] % 2 else None,
    )
    seen = Recorder(lambda p: 1.0 + sum(p.values()))
    walk(space, 40, seen)
    assert len(set(keys(seen.points))) == 40
    assert all(p["a"] % 2 == 0 for p in seen.points)


def test_values_of_every_type_survive_the_search():
    values = {"text": ("x", "y", "z"), "flag": (True, False), "none": (None, 1, 2.5)}
    values["wide"] = tuple(range(40))
    space = Space({name: v[0] for name, v in values.items()}, values)
    seen = Recorder(lambda p: 1.0)
    walk(space, 30, seen)
    for point, (name, allowed) in itertools.product(seen.points, values.items()):
        match = [v for v in allowed if v == point[name]]
        assert type(point[name]) is type(match[0])


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True).map(tuple),
        max_size=4,
    ),
    st.integers(1, 30),
    st.integers(2, 5),
)
def test_every_evaluated_point_is_legal_new_and_within_budget(choices, budget, modulus):
    def constraint(p):
        return Reason("sum", str(sum(p.values())), "other") if sum(p.values()) % modulus else None

    space = Space({name: values[0] for name, values in choices.items()}, choices, constraint)
    seen = Recorder(lambda p: float(sum(p.values())))
    walk(space, budget, seen)
    legal = list(space)
    assert len(seen.points) == len(set(keys(seen.points))) == min(budget, len(legal))
    assert all(point in legal for point in seen.points)


# step by step ------------------------------------------------------------------------------


def test_asking_and_telling_gives_the_same_points():
    whole = Recorder()
    walk(LARGE, 20, whole, seed=1)
    search, steps = Search(LARGE, 20, seed=1), []
    while (point := search.ask()) is not None:
        assert search.ask() == point
        steps.append(point)
        point["m"] = "spoiled by the caller"
        search.tell(landscape(search.ask()))
        steps[-1] = search.found.tried[-1].params
    assert steps == whole.points
    assert search.ask() is None


def test_telling_without_asking_is_refused():
    search = Search(SMALL, 2)
    with pytest.raises(AutoselError, match="no open point"):
        search.tell(1.0)
    search.ask()
    search.tell(1.0)
    with pytest.raises(AutoselError, match="no open point"):
        search.tell(1.0)


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_below_one_is_refused(budget):
    with pytest.raises(AutoselError, match="budget"):
        walk(SMALL, budget, lambda p: 1.0)


def test_what_evaluation_raises_passes_through():
    def interrupt(p):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        walk(LARGE, 5, interrupt)


def test_importing_and_small_spaces_need_no_optuna_and_searching_is_silent():
    code = (
        "import sys\n"
        "from autosel.interfaces import Space\n"
        "from autosel.search import Search\n"
        "def walk(space, budget, value):\n"
        "    search = Search(space, budget)\n"
        "    while search.ask() is not None:\n"
        "        search.tell(value)\n"
        "walk(Space({'a': 1}, {'a': (1, 2)}), 5, 1.0)\n"
        "assert 'optuna' not in sys.modules\n"
        "import optuna\n"
        "before = optuna.logging.get_verbosity()\n"
        "walk(Space({'a': 1}, {'a': tuple(range(50))}), 20, None)\n"
        "assert optuna.logging.get_verbosity() == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "always::FutureWarning", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


BLOCKS = Space(
    default={"up_a": 0, "up_b": 0, "down_a": 0, "down_b": 0, "both": 0, "fixed": 1},
    choices={name: tuple(range(6)) for name in ("up_a", "up_b", "down_a", "down_b", "both")},
    blocks=(("up_a", "up_b"), ("down_a", "down_b"), ("both",)),
)


def apart(point: Params) -> float:
    """Two kernels one after the other: 10 us at best, where all is 4."""
    return 10.0 + sum(abs(int(value or 0) - 4) for name, value in point.items() if name != "fixed")


def test_in_a_space_of_blocks_one_block_at_a_time_varies_around_the_best() -> None:
    search = Search(BLOCKS, 30, seed=3, seeds=[{"up_a": 1, "down_b": 2}])
    leader, best_us, tried = dict(BLOCKS.default), math.inf, []
    while (point := search.ask()) is not None:
        if len(tried) >= 2:  # its own and the seed
            changed = {name for name in point if point[name] != leader[name]}
            blocks = {block for block in BLOCKS.blocks if changed & set(block)}
            assert len(blocks) == 1
            assert 1 <= len(changed) <= CHANGES
            assert blocks == {BLOCKS.blocks[(len(tried) - 2) % 3]}
        us = apart(point)
        tried.append(point)
        if us < best_us:
            leader, best_us = point, us
        search.tell(us)
    assert len(tried) == len({to_json(point) for point in tried}) == 30
    assert best_us <= 13.0  # of 10 to 30; the default takes 30
    assert search.found.tried[0].params == BLOCKS.default


def test_a_block_that_is_used_up_leaves_the_turn_to_others() -> None:
    space = Space({"a": 0, "b": 0}, {"a": (0, 1), "b": tuple(range(3000))}, blocks=(("a",), ("b",)))
    points = first_points(space, 10, 0)
    assert len({to_json(point) for point in points}) == 10
    failing = Search(space, 10)
    count = 0
    while failing.ask() is not None:
        count += 1
        failing.tell(None)
    assert count == 10


def test_a_large_space_is_not_listed_to_be_searched() -> None:
    """Judging every point of a large space took a second of each search."""
    judged = []
    space = Space(
        {"a": 0, "b": 0},
        {"a": tuple(range(100)), "b": tuple(range(100))},
        constraint=lambda point: judged.append(point),
    )
    assert len(first_points(space, 10, 0)) == 10
    assert len(judged) < 1000


def design(path: str, names: tuple[str, ...], size: int = 9, **rest) -> Space:
    values = {name: tuple(range(size)) for name in names}
    return Space({"path": path} | dict.fromkeys(names, 0), values, **rest)


def paths(point) -> float:
    """Short programs start at 100 us and get to 60; long ones at 80 and get to 8."""
    start, gain = (100, 5) if point["path"] == "short" else (80, 9)
    return start - gain * min(v for name, v in point.items() if name != "path")


LONG = design("long", ("b", "c", "d"), blocks=(("b",), ("c", "d")))
RIVALS = replace(
    design("short", ("a", "b", "d", "e"), blocks=(("a", "b"), ("d", "e"))), rivals=(LONG,)
)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_search_goes_on_with_the_design_that_was_fastest(blocks: bool) -> None:
    space = RIVALS
    if not blocks:
        space = replace(RIVALS, blocks=(), rivals=(replace(LONG, blocks=()),))
    seeds = [{"a": 3}, {"path": "long", "c": 1}, {"c": 2}, {"x": 1}, {"path": "wide", "a": 1}]
    search = Search(space, 30, seed=1, seeds=seeds)
    assert search.known == 4
    found = walk(space, 30, paths, 1, seeds)
    points = [tried.params for tried in found.tried]
    assert points[:4] == [  # its own, the best known one, one of the other design, other known ones
        RIVALS.default,
        RIVALS.default | {"a": 3},
        LONG.default | {"c": 1},
        LONG.default | {"c": 2},
    ]
    assert walk(space, 3, paths, 1).tried[1].params == LONG.default  # where none is known
    assert len({to_json(point) for point in points}) == 30
    assert all(set(point) == set(LONG.default) for point in points[4:])
    assert {point["path"] for point in points[4:]} == {"long"}
    assert first_points(space, 30, 1, seeds) == points[:4]
    why = [(skipped.params, skipped.reason.what) for skipped in found.skipped]
    assert why == [({"x": 1}, "parameter"), ({"path": "wide", "a": 1}, "path")]
    slow = walk(space, 30, lambda point: 500 * (point["path"] == "long") + paths(point), 1, seeds)
    assert {tried.params["path"] for tried in slow.tried[4:]} == {"short"}


def test_small_designs_are_all_tried() -> None:
    rival = design("long", ("c",), 3)
    space = replace(design("short", ("a",), 4), rivals=(rival,))
    tried = [t.params for t in walk(space, 7, paths).tried]
    assert sorted(map(to_json, tried)) == sorted(map(to_json, space))
    fewer = [t.params["path"] for t in walk(space, 6, paths).tried]
    assert fewer == ["short"] + ["long"] * 3 + ["short"] * 2  # all of the better one first
    twins = [replace(design(path, ("a",), 40)) for path in ("short", "long")]
    points = walk(replace(twins[0], rivals=(twins[1],)), 79, paths).tried
    assert len({to_json(t.params) for t in points}) == 79
    with pytest.raises(AutoselError, match="rivals of a rival"):
        replace(twins[0], rivals=(replace(twins[1], rivals=(twins[0],)),))
    assert [design.rivals for design in space.designs] == [(), ()]


def grown(size: int, kind: str = "one", own: float = 1.0) -> Space:
    """Rows that grow with the call, and a block that does not."""
    rows = tuple(round(size * own * factor) for factor in (1, 0.25, 0.5, 2, 4))
    values = {"rows": rows, "block": (1, 2, 4)}
    return Space({"kind": kind, "rows": rows[0], "block": 1}, values, relative=("rows",))


@pytest.mark.parametrize(
    ("there", "rows", "here", "expected"),
    [
        (64, 64, 512, 512),
        (64, 128, 512, 1024),
        (512, 128, 64, 16),
        (64, 64, 64, 64),
        (64, 48, 512, 512),  # between two: the nearer one by ratio, 384 of 256 and 512
        (64, 9999, 512, 2048),  # none of this version's choices
        (64, 0, 512, 0),  # no size, so nothing to go by
        (64, "all", 512, "all"),
        (64, True, 512, True),
    ],
)
def test_what_grows_with_the_call_is_carried_in_proportion(there, rows, here, expected) -> None:
    point = {"kind": "one", "rows": rows, "block": 4}
    moved = grown(here).carried(point, grown(there))
    assert moved == {"kind": "one", "rows": expected, "block": 4}
    assert point["rows"] is rows
    assert replace(grown(here), relative=()).carried(point, grown(there)) == point


def test_each_design_carries_by_its_own_default() -> None:
    here, there = (replace(grown(size), rivals=(grown(size, "two", 8.0),)) for size in (64, 512))
    assert here.carried({"kind": "one", "rows": 1024}, there) == {"kind": "one", "rows": 128}
    assert here.carried({"kind": "two", "rows": 1024}, there) == {"kind": "two", "rows": 128}
    assert here.carried({"kind": "two", "rows": 8192}, there) == {"kind": "two", "rows": 1024}
    assert here.carried({"kind": "two"}, there) == {"kind": "two"}


def test_where_no_design_works_the_first_is_searched() -> None:
    found = walk(RIVALS, 12, lambda point: None)
    assert [t.params["path"] for t in found.tried] == ["short", "long"] + ["short"] * 10
