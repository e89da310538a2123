"""Differences of two results, by hand, and the gate's exit status."""

import json
from dataclasses import replace

import pytest

from autosel import evidence_files, presets
from autosel.core import Candidate
from autosel.diff_results import compare_results
from autosel.errors import AutoselError
from autosel.store import Store
from tests.made_evidence import COLD, CPU, GPU, decided, evidence, row


def side(us=100.0, *, winner="a", device=GPU, spread=0.01, counts=(1, 16), shift=0, **more):
    rows, decisions = [], []
    bounds = {1: (1, 4), 16: (5, None), 64: (33, None)}
    for count in counts:
        for name in ("a", "b"):
            m = row(name, count, us if name == winner else 3 * us, device=device, spread=spread)
            # Another run: its samples do not rise and fall with the first's.
            m = replace(m, times_us=m.times_us[shift:] + m.times_us[:shift])
            rows.append(m)
            if name == winner:
                decisions.append(decided(m, *bounds[count]))
    return evidence(rows, decisions, device=device, **more)


def only(found):
    """The change at 16 tokens."""
    return next(cell for cell in found.cells if cell.num_tokens == 16)


def test_nothing_changed():
    found = compare_results([side()], [side()])
    assert {cell.kind for cell in found.cells} == {"same"}
    assert found.mean_ratio == 1
    assert not found.regressions
    assert not found.machines


def test_slower_beyond_the_threshold_and_the_noise_regresses():
    found = compare_results([side()], [side(110, shift=3)], threshold=0.05)
    cell = only(found)
    assert cell.ratio == pytest.approx(1.1, rel=0.01)
    assert 1.05 < cell.interval[0] < cell.ratio < cell.interval[1] < 1.15
    assert (cell.settled, cell.regression) == (True, True)
    assert not compare_results([side()], [side(110, shift=3)], threshold=0.2).regressions
    assert not compare_results([side(110)], [side(100, shift=3)]).regressions  # faster


def test_noise_is_no_regression():
    found = compare_results([side(spread=0.6)], [side(106, spread=0.6, shift=5)], threshold=0.01)
    cell = only(found)
    assert cell.settled is False
    assert cell.ratio > 1.01
    assert not found.regressions


def test_a_flip_is_told_and_only_its_time_counts():
    found = compare_results([side()], [side(winner="b", shift=3)])
    assert len(found.flips) == 2
    assert only(found).second == Candidate("b")
    assert not found.regressions
    assert len(compare_results([side()], [side(150, winner="b")]).regressions) == 2


def test_what_can_no_longer_be_chosen_regresses_and_says_why():
    broken = evidence([row(name, n, 0, status="wrong", reason="off") for n in (1, 16)
                       for name in ("a", "b")])  # fmt: skip
    found = compare_results([side()], [broken])
    assert {cell.kind for cell in found.cells} == {"lost"}
    assert len(found.regressions) == 2
    assert {(s.first, s.second, s.reason) for s in found.statuses} == {("ok", "wrong", "off")}
    assert {cell.kind for cell in compare_results([broken], [side()]).cells} == {"gained"}


def test_what_was_not_measured_again_is_told():
    found = compare_results([side(counts=(1, 16))], [side(counts=(1,))])
    assert only(found).kind == "missing"
    assert found.missing == 1
    assert not found.regressions
    other = presets.get("granite-3-1b-a400m")
    extra = evidence(
        [row("a", 1, 5, problem=other)],
        [decided(row("a", 1, 5, problem=other), 1, None)],
        problem=other, label="extra",
    )  # fmt: skip
    found = compare_results([side(), extra], [side()])
    assert found.only_first == ("extra, uniform routing, Test GPU",)


def test_a_gate_that_compares_nothing_does_not_pass():
    with pytest.raises(AutoselError, match="at least one, on the same device"):
        compare_results([side()], [side(device=CPU)])
    assert len(compare_results([side()], [side(device=CPU)], any_device=True).cells) == 2
    with pytest.raises(AutoselError, match="at least one"):
        compare_results([side(counts=(1,))], [side(counts=(64,))])


def test_software_that_changed_is_named_and_still_compared():
    newer = replace(GPU, versions=(("torch", "2.14.0"),), driver="2")
    found = compare_results([side()], [side(device=newer)])
    ((name, differences),) = found.machines
    assert name == "Test GPU"
    assert {d.field for d in differences} == {"versions.torch", "versions.driver"}
    assert all(cell.ratio for cell in found.cells)


def test_without_samples_the_ratio_alone_counts():
    first, second = side(figures="a table"), side(110, figures="a table")
    cell = only(compare_results([first], [second]))
    assert (cell.interval, cell.settled, cell.regression) == (None, None, True)
    assert cell.ratio == pytest.approx(1.1, rel=1e-6)


def filled(path, us, **more):
    with Store.open(path) as store:
        one = side(us, **more)
        for m in one.measurements:
            store.add_measurement(m)
        for d in one.decisions:
            store.add_decision(d, one.device, COLD)
    return path


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    from autosel.__main__ import main

    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "own.db"))

    def call(*args):
        status = main(["diff", *map(str, args)])
        return status, *capsys.readouterr()

    return call


def test_the_exit_status_is_a_gate(run, tmp_path):
    first = filled(tmp_path / "a.db", 100.0)
    before = first.read_bytes()
    slower, same = filled(tmp_path / "b.db", 120.0, shift=3), filled(tmp_path / "c.db", 100.0)
    assert run(first, same)[0] == 0
    status, out, _ = run(first, slower)
    assert status == 1
    assert "REGRESSED" in out
    assert "1.200" in out
    assert run(first, slower, "--threshold", 30)[0] == 0
    status, out, _ = run(first, slower, "--json")
    data = json.loads(out)
    assert (status, data["regressed"], len(data["cells"])) == (1, True, 2)
    assert data["cells"][0]["first"]["key"] == "a"
    narrow = filled(tmp_path / "d.db", 100.0, counts=(1,))
    assert run(first, narrow)[0] == 0
    assert run(first, narrow, "--strict")[0] == 1
    assert first.read_bytes() == before  # reading leaves the file as it is
    assert not (tmp_path / "own.db").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "found something else"),
        (b"SQLite format 3\0 and then nothing of the kind", "cannot be read as a database"),
        (b'{"format": "autosel-export", "version": 2}', "version"),
        (b'{"format": "autosel-export", "version": 1, "measurements": 7}', "measurements"),
        (b'{"format": "autosel-export", "version": 1, "measurements": [{}], "decisions": []}',
         "measurements[0]"),
        (b'{"format": "autosel-export", "version": 1, "measurements": [], "decisions": []}',
         "found none"),
        (b'{"format": "autosel-pack", "version": 1}', "sha256"),
        (b'{"format": "autosel-export", "version": 1, "measurements": [NaN]}', ""),
        (b"[" * 100000, ""),
        (b"\xff\xfe\x00", ""),
    ],
)  # fmt: skip
def test_bad_input_is_status_2_in_one_line(run, tmp_path, content, words):
    good, bad = filled(tmp_path / "a.db", 100.0), tmp_path / "bad"
    if content is not None:
        bad.write_bytes(content)
    for args in ((good, bad), (bad, good)):
        status, _, err = run(*args)
        assert status == 2
        lines = [line for line in err.splitlines() if line]
        assert len(lines) == 1, err
        assert words in lines[0]


def test_a_database_its_export_and_its_pack_say_the_same(run, tmp_path):
    from autosel.__main__ import main

    base = filled(tmp_path / "a.db", 100.0)
    export = tmp_path / "a.json"
    assert main(["export", "--db", str(base), "-o", str(export)]) == 0
    read, again = evidence_files.read(base), evidence_files.read(export)
    assert [one.measurements for one in read] == [one.measurements for one in again]
    assert [one.decisions for one in read] == [one.decisions for one in again]
    assert run(base, export)[0] == 0
    assert run(export, filled(tmp_path / "b.db", 130.0, shift=3))[0] == 1


def test_planted_fault_a_gate_that_ignored_its_threshold_would_be_seen(monkeypatch):
    """With the comparison turned round a slow-down passes: the tests above rely on its sense."""
    assert compare_results([side(100)], [side(120, shift=3)]).regressions
    assert not compare_results([side(120)], [side(100, shift=3)]).regressions
