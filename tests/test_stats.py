"""Estimates, intervals and comparisons of timing samples."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosel import stats
from autosel.errors import AutoselError

TIMES = st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=40)


def noisy(rng: np.random.Generator, n: int, centre: float = 100.0, noise: float = 0.05):
    return tuple(centre * (1 + noise * rng.standard_normal(n)))


def test_the_ranking_quantile_is_low_on_a_cpu_and_the_median_elsewhere():
    assert stats.ranking_quantile("cpu") == 0.2
    assert {stats.ranking_quantile(kind) for kind in ("cuda", "rocm", "xpu")} == {0.5}


def test_summary_of_known_samples():
    summary = stats.summarize([5.0, 1.0, 3.0, 2.0, 4.0], 0.5)
    assert (summary.estimate_us, summary.median_us, summary.min_us) == (3.0, 3.0, 1.0)
    assert (summary.low_us, summary.high_us, summary.samples) == (2.0, 4.0, 5)
    assert summary.spread == pytest.approx(2 / 3)


@given(TIMES)
def test_summary_agrees_with_the_standard_library(times):
    summary = stats.summarize(times, 0.2)
    assert summary.median_us == pytest.approx(statistics.median(times))
    assert summary.min_us == min(times)
    assert min(times) <= summary.estimate_us <= max(times)
    assert stats.estimate(times, 0.2).us == pytest.approx(summary.estimate_us)


@pytest.mark.parametrize("bad", [[], [math.nan], [1.0, math.inf], [0.0], [-1.0], [1.0, -math.inf]])
def test_samples_that_are_no_times_are_refused_in_one_line(bad):
    for use in (stats.summarize, stats.estimate):
        with pytest.raises(AutoselError, match="times_us: samples: found") as caught:
            use(bad, 0.5)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("probability", "dof", "expected"),
    # Printed tables of Student's t (NIST/SEMATECH e-Handbook, section 1.3.6.7.2).
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.995, 10, 3.169),
        (0.999, 3, 10.215),
        (0.95, 30, 1.697),
    ],
)
def test_student_t_quantiles_match_printed_tables(probability, dof, expected):
    assert stats.student_t(probability, dof) == pytest.approx(expected, abs=6e-4)


def test_the_same_input_gives_the_same_answer():
    rng = np.random.default_rng(0)
    a, b = noisy(rng, 20), noisy(rng, 20)
    assert stats.compare(a, b, 0.2) == stats.compare(a, b, 0.2)


@settings(max_examples=30)
@given(TIMES, st.floats(1.01, 3.0))
def test_a_comparison_is_antisymmetric_and_knows_an_exact_factor(times, factor):
    slower = [factor * t for t in times]
    there, back = stats.compare(slower, times, 0.2), stats.compare(times, slower, 0.2)
    assert there.log == pytest.approx(math.log(factor), rel=1e-6)
    assert there.log == pytest.approx(-back.log)
    # Shared indices: the same samples scaled differ by a constant in every replica.
    assert there.stderr == pytest.approx(0.0, abs=1e-9)


def test_drift_that_interleaved_samples_share_cancels():
    rng = np.random.default_rng(1)
    drift = 1 + 0.5 * rng.random(40)
    fast = 100 * drift * (1 + 0.002 * rng.standard_normal(40))
    slow = 103 * drift * (1 + 0.002 * rng.standard_normal(40))
    together = stats.compare(slow, fast, 0.5)
    apart = stats.compare(rng.permutation(slow), fast, 0.5)
    assert together.exceeds(0.01, 0.95)
    assert not apart.exceeds(0.01, 0.95)
    assert together.stderr < apart.stderr / 4


@pytest.mark.parametrize("quantile", [0.2, 0.5])
@pytest.mark.parametrize("n", [5, 8, 20])
def test_intervals_cover_and_equal_candidates_seldom_look_different(n, quantile):
    rng = np.random.default_rng(n)
    tries = 150
    covered = separated = 0
    for _ in range(tries):
        ratio = stats.compare(noisy(rng, n), noisy(rng, n), quantile)
        low, high = ratio.interval(0.95)
        covered += low <= 0 <= high
        separated += ratio.exceeds(0.01, 0.9975)
    assert covered / tries > 0.89
    assert separated / tries < 0.02


def blocky(rng, blocks, size, effect, noise=0.02):
    """Samples ``[blocks * size]`` whose blocks differ by ``effect``, as on a busy machine."""
    times = np.exp(noise * np.abs(rng.standard_normal((blocks, size))))
    return tuple((100 * times * np.exp(effect * rng.standard_normal((blocks, 1)))).ravel())


@pytest.mark.parametrize("quantile", [0.2, 0.5])
def test_intervals_cover_when_samples_of_a_block_resemble_each_other(quantile):
    rng = np.random.default_rng(11)
    tries, known, unknown, separated = 120, 0, 0, 0
    for _ in range(tries):
        a, b = blocky(rng, 5, 10, 0.03), blocky(rng, 5, 10, 0.03)
        ratio = stats.compare(a, b, quantile, blocks=(10,) * 5)
        low, high = ratio.interval(0.95)
        known += low <= 0 <= high
        separated += ratio.exceeds(0.01, 0.9975)
        low, high = stats.compare(a, b, quantile).interval(0.95)
        unknown += low <= 0 <= high
    assert known / tries > 0.86
    assert separated / tries < 0.03
    # Single samples promise far more than they hold: the test sees the difference.
    assert unknown / tries < 0.75


def test_blocks_that_do_not_differ_cost_little():
    rng = np.random.default_rng(12)
    widths = []
    for _ in range(40):
        a, b = blocky(rng, 5, 10, 0.0), blocky(rng, 5, 10, 0.0)
        with_blocks = stats.compare(a, b, 0.2, blocks=(10,) * 5).half_width(0.95)
        widths.append(with_blocks / stats.compare(a, b, 0.2).half_width(0.95))
    assert statistics.median(widths) < 1.3


def test_drift_between_blocks_that_both_suffered_cancels():
    rng = np.random.default_rng(13)
    drift = np.repeat(np.exp(0.2 * rng.standard_normal(6)), 5)
    fast = drift * np.array(noisy(rng, 30, 100, 0.003))
    slow = drift * np.array(noisy(rng, 30, 104, 0.003))
    assert stats.compare(slow, fast, 0.5, blocks=(5,) * 6).exceeds(0.01, 0.9975)


def test_few_blocks_are_known_to_vary_less_among_themselves_than_about_the_truth():
    rng = np.random.default_rng(15)
    slow = stats.estimate(blocky(rng, 4, 10, 0.1), 0.5, blocks=(10,) * 4)
    fast = stats.estimate((100.0,) * 40, 0.5, blocks=(10,) * 4)
    low, high = np.quantile(slow.block_replicas - fast.block_replicas, [0.05, 0.95])
    expected = (high - low) / (2 * 1.6449) * math.sqrt(4 / 3)
    assert slow.over(fast).stderr == pytest.approx(expected, rel=1e-4)


def test_blocks_of_different_sizes_weigh_the_same():
    times = [1.0, 2.0, 3.0, 10.0, 20.0, 7.0]
    table = stats._by_block(np.array(times), (3, 2, 1))
    assert table.T.tolist() == [[1.0, 2.0, 3.0], [10.0, 10.0, 20.0], [7.0, 7.0, 7.0]]
    assert stats.estimate(times, 0.5, blocks=(3, 2, 1)).us == stats.estimate(times, 0.5).us


@pytest.mark.parametrize("blocks", [(1, 1), (3, 0), (4, -1), (1, 1, 1, 1)])
def test_blocks_that_do_not_fit_the_samples_are_refused(blocks):
    with pytest.raises(AutoselError, match="blocks: sizes: found"):
        stats.estimate([1.0, 2.0, 3.0], 0.5, blocks=blocks)


def test_too_few_blocks_say_nothing_about_blocks():
    rng = np.random.default_rng(14)
    a, b = noisy(rng, 10), noisy(rng, 10)
    assert stats.compare(a, b, 0.5, blocks=(5, 5)) == stats.compare(a, b, 0.5)


def test_five_samples_settle_a_clear_difference_and_one_wild_sample_does_not_undo_it():
    fast, slow = [100.0, 101, 99, 100.5, 99.5], [200.0, 202, 198, 201, 199]
    assert stats.compare(slow, fast, 0.5).exceeds(0.01, 0.9975)
    assert stats.compare([*slow, *slow], [*fast, *fast[:4], 5000.0], 0.5).exceeds(0.01, 0.9975)
    assert stats.compare([*slow, *slow], [*fast, *fast[:4], 5000.0], 0.2).exceeds(0.01, 0.9975)


def test_one_sample_never_settles_anything():
    ratio = stats.compare([200.0], [100.0], 0.5)
    assert ratio.margin == pytest.approx(1.0)
    assert ratio.interval(0.95) is None
    assert not ratio.exceeds(0.01, 0.95)


def test_different_sample_counts_compare():
    rng = np.random.default_rng(3)
    ratio = stats.compare(noisy(rng, 30, 150), noisy(rng, 12, 100), 0.5)
    assert ratio.exceeds(0.01, 0.9975)
    assert ratio.dof == 11


def test_long_sample_lists_are_resampled_in_pieces(monkeypatch):
    rng = np.random.default_rng(4)
    times = noisy(rng, 50)
    whole = stats.estimate(times, 0.2)
    monkeypatch.setattr(stats, "_CHUNK", 700)
    pieces = stats.estimate(times, 0.2)
    np.testing.assert_array_equal(whole.replicas, pieces.replicas)


@given(st.integers(1, 30), st.floats(0, 1))
def test_quantiles_of_rows_are_numpys(columns, quantile):
    table = np.random.default_rng(columns).random((7, columns))
    expected = np.quantile(table, quantile, axis=1)
    np.testing.assert_allclose(stats._row_quantiles(table, quantile), expected, rtol=1e-12)


def test_a_comparison_is_fast():
    rng = np.random.default_rng(5)
    a, b = noisy(rng, 50), noisy(rng, 50)
    stats.compare(a, b, 0.2)
    start = time.perf_counter()
    stats.compare(a, b, 0.2)
    # Milliseconds when the machine is idle; the bound only catches a loop over resamples.
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize(("slow", "fast"), [(3e9, 5e-324), (1e300, 1e-300), (1.7e308, 1.0)])
def test_times_that_no_machine_has_overflow_nothing(slow, fast):
    for samples in (1, 20):
        ratio = stats.compare([slow] * samples, [fast] * samples, 0.5)
        for found in (ratio, stats.compare([fast] * samples, [slow] * samples, 0.5)):
            assert math.isfinite(found.margin)
            assert found.margin >= -1
            interval = found.interval(0.95)
            assert interval is None or all(map(math.isfinite, interval))
        assert ratio.margin > 1e300 or ratio.log < 700.1
    assert math.isfinite(stats.estimate([1.797e308], 0.5).us)
