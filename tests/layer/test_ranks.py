"""Ranks of a real gloo group decide as one, and none of them ever waits for ever."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch import distributed

from autosel.errors import RankError
from autosel.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()),
        reason="this torch is built without gloo",
    ),
    pytest.mark.timeout(200),
]

TWO = pytest.mark.parametrize("size", [2])
BOTH = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
FOUR = pytest.mark.parametrize("size", [pytest.param(4, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def launcher():
    """The process that ranks are forked from: importing torch in each takes most of the time."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.layer.rank_worker"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run(tmp_path, launcher):
    """Answers of every rank by rank; None for one that was killed."""

    def start(scenario: str, size: int, dead: tuple[int, ...] = ()) -> list[dict | None]:
        launcher.stdin.write(json.dumps([str(tmp_path), size, scenario, dead]) + "\n")
        launcher.stdin.flush()
        failed = json.loads(launcher.stdout.readline())
        assert failed == [], "their tracebacks are on standard error"
        files = [tmp_path / f"{rank}.json" for rank in range(size)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]

    return start


def same(answers: list[dict | None]) -> dict:
    """The answer that all ranks gave."""
    first = answers[0]
    assert first is not None
    assert all(answer == first for answer in answers), answers
    return first


def test_without_torch_distributed_there_are_no_ranks():
    with pytest.raises(RankError, match="found not up"):
        Ranks()


# one choice --------------------------------------------------------------------------------


@BOTH
def test_asymmetric_databases_give_the_leaders_choice(run, size):
    assert same(run("asymmetric", size))["choices"] == [["1+", "alpha", True]]


@TWO
def test_ranks_that_decide_alone_differ_and_the_comparison_sees_it(run, size):
    answers = run("alone_they_differ", size)
    with pytest.raises(AssertionError):
        same(answers)


@TWO
def test_what_only_another_rank_has_stored_does_not_count(run, size):
    answer = same(run("leader_has_nothing", size))
    assert [tuned for _, _, tuned in answer["choices"]] == [False] * len(answer["choices"])
    assert "alpha" not in str(answer["choices"])


@BOTH
def test_a_rank_that_does_not_support_the_winner_vetoes_it_for_all(run, size):
    assert same(run("veto_by_support", size))["choices"] == [["1+", "beta", True]]


@BOTH
def test_memory_that_is_short_on_one_rank_excludes_for_all_and_spoils_no_database(run, size):
    leader, *others = run("out_of_memory", size)
    assert leader.pop("leader_rows") == ["ok", "ok"]
    assert same([leader, *others])["choices"] == [["1+", "beta", True]]


@TWO
def test_a_wrong_result_on_one_rank_excludes_for_all(run, size):
    assert same(run("wrong_on_one", size))["choices"] == [["1+", "beta", True]]


@BOTH
def test_parts_with_different_numbers_of_experts_run_the_same_candidate(run, size):
    assert same(run("uneven_experts", size))["choices"] == [["1+", "alpha", True]]


@FOUR
def test_two_groups_with_equal_inner_ranks_share_a_database(run, size):
    answers = run("subgroups", size)
    for half, name in ((answers[:2], "alpha"), (answers[2:], "beta")):
        answer = same(half)
        assert answer["choices"] == [["1+", name, True]]
        assert answer["entries"] == [32, 64]


@TWO
def test_without_a_group_nobody_waits(run, size):
    answers = run("no_group_is_alone", size)
    assert answers[0]["choices"] == [["1+", "alpha", True]]


# one error ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scenario", "line"),
    [
        ("nothing_usable", "the leading rank failed: nothing usable for"),
        ("leader_fails", "the leading rank failed: the leader's disk is gone"),
        ("weights_missing_on_one", "failed: shard 3: expert 5: found nothing, expected w2"),
        ("other_layer_on_one", "hidden_size: found 64 on rank 1, expected 32 as on rank 0"),
        ("refused_on_one", "'no such device'"),
        ("folder_missing_on_one", "nowhere"),
        ("model_missing_on_one", "nowhere"),
        ("sweep_fails", "the leading rank failed: weights: found nothing, expected a shard"),
    ],
)
@BOTH
def test_every_rank_raises_the_same_line(run, size, scenario, line):
    answer = same(run(scenario, size))
    assert answer["raised"] == "RankError"
    assert line in answer["line"]
    assert "\n" not in answer["line"]


@TWO
def test_a_late_fault_on_one_rank_is_raised_and_not_replaced_there_alone(run, size):
    fine, broken = run("runtime_failure", size)
    assert fine["choices"] == [["1+", "alpha", True]]
    assert broken["raised"] == "RankError"
    assert "alpha failed in a call on one rank of several" in broken["line"]


@BOTH
def test_a_leader_that_is_killed_is_noticed(run, size):
    begun = time.monotonic()
    leader, *others = run("leader_killed", size, dead=(0,))
    assert leader is None
    assert same(others)["line"].startswith("ranks: answer: found none from a rank that ended")
    assert time.monotonic() - begun < 120  # not the half hour that a rank may take to arrive


@TWO
def test_a_leader_that_hangs_is_noticed(run, size):
    _, *others = run("leader_stopped", size, dead=(0,))
    assert same(others)["line"].startswith("ranks: answer: found none from a rank that ended")


@BOTH
def test_a_rank_that_is_killed_is_noticed_by_all(run, size):
    *others, killed = run("follower_killed", size, dead=(size - 1,))
    assert killed is None
    assert same(others)["line"].startswith("ranks: answer: found none from a rank that ended")


@TWO
def test_an_interrupt_of_the_leader_is_passed_on(run, size):
    leader, other = run("leader_interrupted", size)
    assert leader == {"interrupted": True}
    assert other["line"] == "the leading rank failed: KeyboardInterrupt"


# the wire ----------------------------------------------------------------------------------


@TWO
def test_a_leader_may_work_longer_than_any_silence(run, size):
    assert same(run("slow_leader", size)) == {"answer": {"a": [1, None, "é"]}}


@BOTH
def test_messages_of_any_size_arrive_in_order(run, size):
    answer = same(run("messages", size))
    expected = [[0] * size, [1] * size, [100_000 * (rank + 1) for rank in range(size)]]
    assert answer == {"got": expected, "led": {"from": 0}}


def test_nothing_is_ever_unpickled():
    source = "".join(path.read_text() for path in (ROOT / "autosel").glob("ranks*.py"))
    for word in ("pickle.", "broadcast_object", "all_gather_object", "torch.load"):
        assert word not in source


# sweeps ------------------------------------------------------------------------------------


@BOTH
def test_one_rank_tunes_and_all_decide_the_same_whoever_is_slow(run, size):
    leader, *others = run("sweep_with_noise", size)
    assert leader["rows"] > 0
    assert [other["rows"] for other in others] == [0] * (size - 1)  # only the leader measures
    for answer in others:
        assert {**answer, "rows": leader["rows"]} == leader
    assert len(leader["winners"]) == 2


@BOTH
def test_a_winner_that_does_not_fit_on_one_rank_is_excluded_on_all(run, size):
    leader, *others = run("sweep_with_memory_fault", size)
    for answer in others:
        assert {**answer, "rows": leader["rows"]} == leader
    assert "alpha" not in str(leader["winners"])
    reasons = [(s, r) for key, s, r in leader["rejected"] if key == "alpha"]
    if any(s == "oom" for s, _ in reasons):  # alpha had won
        assert all(f"rank {size - 1}: " in r for s, r in reasons if s == "oom")
