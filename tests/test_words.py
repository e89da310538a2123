"""Layers, devices and decisions in words."""

from dataclasses import replace

import pytest

from autosel.core import Candidate, Decision, Problem, QuantScheme, Rejected, TokenBucket
from autosel.decide_words import SLOWER, TIED, UNSETTLED
from autosel.words import is_settled, open_rivals, settled_text

SCHEME = QuantScheme(4, 32, True)
DECISION = Decision(
    problem=Problem(8, 8, 2, 64, 64, SCHEME, SCHEME),
    bucket=TokenBucket(1, None, 1),
    routing="uniform",
    winner=Candidate("fast"),
    winner_us=1.0,
    runner_up=Candidate("other"),
    runner_up_us=2.0,
    margin=1.0,
    margin_interval=(0.9, 1.1),
    tie=True,
    why="",
)


@pytest.mark.parametrize(
    ("tie", "words", "expected"),
    [
        (False, [SLOWER], "yes"),
        (True, [TIED, SLOWER], "no: tie"),
        (True, [UNSETTLED, UNSETTLED, SLOWER], "no: 2 too noisy"),
        (True, [TIED, UNSETTLED], "no: tie"),
    ],
)
def test_a_tie_is_told_from_rivals_that_are_too_noisy(tie, words, expected):
    others = tuple(
        Rejected(Candidate(f"rival{i}"), "ok", f"{word} 3 %") for i, word in enumerate(words)
    )
    assert settled_text(replace(DECISION, tie=tie, rejected=others)) == expected


def test_settings_of_the_chosen_backend_leave_no_doubt_about_the_backend():
    own = Rejected(Candidate.of("fast", {"n": 1}), "ok", f"{TIED} 0.2 %")
    noisy = Rejected(Candidate.of("fast", {"n": 2}), "ok", f"{UNSETTLED} 2 %")
    far = Rejected(Candidate("other"), "ok", f"{SLOWER} 90 %")
    found = replace(DECISION, rejected=(own, noisy, far))
    assert (settled_text(found), is_settled(found)) == ("yes (settings tie)", True)
    assert open_rivals(found) == [own.candidate, noisy.candidate]
    near = replace(far, reason=f"{TIED} 0.4 %")
    found = replace(DECISION, rejected=(own, noisy, near))
    assert (settled_text(found), is_settled(found)) == ("no: tie", False)
    assert open_rivals(found) == [near.candidate]
    assert settled_text(replace(DECISION, rejected=())) == "no: tie"  # who is not said
