"""Results of one layer timed in two ways never stand side by side as if they were one."""

from dataclasses import replace

import pytest

from autosel import evidence_files
from autosel.diff_results import compare_results
from autosel.errors import AutoselError
from autosel.evidence import gather, gather_all
from autosel.store import Store
from tests.made_evidence import COLD, GPU, PROBLEM, decided, evidence, row

SMALL, HUGE = ((("clock", "perf_counter"), ("huge_pages", huge)) for huge in (False, True))


def add(store, timing, us, counts=(1, 16)):
    for count in counts:
        found = [row("a", count, us, timing=timing), row("b", count, 2 * us, timing=timing)]
        store.add_measurements(found)
        low, high = (1, 4) if count == 1 else (5, None)
        store.add_decision(decided(found[0], low, high), GPU, (*COLD, *timing))


@pytest.fixture
def path(tmp_path):
    """Timed with small pages, then with huge ones."""
    with Store.open(tmp_path / "both.db") as store:
        add(store, SMALL, 600.0)
        add(store, HUGE, 500.0)
    return tmp_path / "both.db"


def test_decisions_are_those_of_the_samples_beside_them(path, tmp_path) -> None:
    with Store.open(path) as store:
        one = gather(store, PROBLEM, GPU)
        export = tmp_path / "both.json"
        export.write_text(store.export_json())
    (filed,) = evidence_files.read(export)
    for found in (one, filed, *evidence_files.read(path)):
        assert [d.bucket.measured for d in found.decisions] == [1, 16]
        assert [round(d.winner_us) for d in found.decisions] == [500, 500]
        assert {dict(m.timing)["huge_pages"] for m in found.measurements} == {True}
    same = compare_results(evidence_files.read(path), evidence_files.read(export))
    assert [(cell.kind, cell.ratio, cell.regression) for cell in same.cells] == [
        ("same", 1.0, False)
    ] * 2
    assert not same.machines


def test_a_count_that_only_the_older_way_has_is_left_to_it(tmp_path) -> None:
    with Store.open(tmp_path / "a.db") as store:
        add(store, SMALL, 600.0)
        add(store, HUGE, 500.0, counts=(16,))
        one = gather(store, PROBLEM, GPU)
    assert [(d.bucket.measured, round(d.winner_us)) for d in one.decisions] == [(16, 500)]


def test_a_diff_says_that_the_sides_were_timed_otherwise(path, tmp_path) -> None:
    with Store.open(tmp_path / "small.db") as store:
        add(store, SMALL, 600.0)
    found = compare_results(evidence_files.read(tmp_path / "small.db"), evidence_files.read(path))
    ((_, (difference,)),) = found.machines
    assert (difference.field, difference.wanted, difference.stored) == (
        "timing huge_pages", False, True,
    )  # fmt: skip


def test_a_layer_is_of_the_way_in_which_it_was_timed(tmp_path) -> None:
    """Refusals belong to every way; a layer that was only timed cold is no hot result."""
    refused = replace(row("b", 1, 0.0, status="unsupported"), timing=())
    hot = {"cache": "hot"}
    with Store.open(tmp_path / "a.db") as store:
        store.add_measurements([refused])
        assert len(gather_all(store)) == len(gather_all(store, timing=hot)) == 1
        store.add_measurements([row("a", 1, 50.0)])
        assert len(gather_all(store)) == 1
        assert gather_all(store, timing=hot) == []


def test_nothing_to_compare_says_why() -> None:
    cold = evidence([row("a", 1, 50.0)], [decided(row("a", 1, 50.0), 1, None)])
    other = evidence([row("a", 1, 50.0, routing="zipf")])
    other = type(other)(**{**vars(other), "routing": "zipf"})
    with pytest.raises(AutoselError) as error:
        compare_results([cold], [other])
    assert "layer, uniform routing, on Test GPU at 1 tokens against layer, zipf" in str(error.value)
    failed = evidence([row("a", 1, 0.0, status="wrong")])
    with pytest.raises(AutoselError, match="decisions of the same layer at the same token count"):
        compare_results([failed], [failed])
