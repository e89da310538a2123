"""The pages made from shipped results are fresh, and the index leads somewhere."""

import re
import shutil
from html.parser import HTMLParser

import pytest

from autosel.store import Store
from bench import findings, results_index
from bench.results_data import RESULTS, SYSTEMS, epyc_evidence, h200_evidence, rows
from tests.made_evidence import COLD, GPU, decided, row

PAGE = findings.PAGE.read_text(encoding="utf-8")


def test_the_tables_of_the_findings_follow_the_data():
    assert findings.render(PAGE) == PAGE, "run: scripts/findings"
    assert {name for _, name, _ in findings.MARK.findall(PAGE)} == set(findings.TABLES)
    # Planted: a number that does not follow is seen.
    number = re.search(r"\| \d+\.\d+ \|", PAGE)[0]
    assert findings.render(PAGE.replace(number, "| 99.99 |", 1)) == PAGE


def test_a_table_says_what_the_file_says():
    """Cells looked up by hand in the CSV files."""
    times = {(r["model"], r["tokens"], r["system"]): r["us"] for r in rows(findings.H200)}
    us = times["mixtral-8x7b", "16", "marlin"]
    assert f"| mixtral-8x7b | 16 | {float(us):,.1f} |" in PAGE
    cpu = {(r["shape"], r["tokens"], r["backend"]): float(r["us"]) for r in rows(findings.EPYC)}
    ratio = cpu["A", "64", "zen_cpu"] / cpu["A", "64", "cpu_native"]
    line = next(x for x in findings.epyc_order().splitlines() if x.startswith("| A | 64 |"))
    assert line.endswith(f"| {ratio:.2f} |")


def test_shipped_tables_are_read_whole():
    h200 = h200_evidence(RESULTS / "nvidia-h200" / "kernels.csv")
    kept = [r for r in rows(findings.H200) if r["system"] in SYSTEMS]
    assert sum(len(one.measurements) for one in h200) == len(kept)
    for one in h200:
        assert one.figures
        assert one.target, one.label  # each is a preset, so that it can be measured again
    epyc = epyc_evidence(RESULTS / "amd-epyc-2-cores" / "cpu.csv")
    assert sum(len(one.measurements) for one in epyc) == len(rows(findings.EPYC))
    assert {d.accuracy for one in epyc for d in one.decisions} == {"exact"}


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("href", "src")]


def leads_somewhere(index):
    links = Links()
    links.feed(index.read_text(encoding="utf-8"))
    for link in links.found:
        if not link.startswith("#"):
            assert "://" not in link
            yield index.parent / link


def test_every_link_of_the_shipped_index_leads_somewhere():
    found = list(leads_somewhere(RESULTS / "index.html"))
    assert len(found) > 10
    for place in found:
        assert place.exists(), place


@pytest.fixture
def results(tmp_path):
    root = tmp_path / "results"
    root.mkdir()
    (root / "README.md").write_text("words")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "findings.md").write_text("words")
    for name in ("amd-epyc-2-cores/cpu.csv",):
        (root / name).parent.mkdir()
        shutil.copy(RESULTS / name, root / name)
    return root


def test_the_index_takes_tables_databases_and_exports(results, capsys):
    from autosel.__main__ import main

    place = results / "some-gpu"
    place.mkdir()
    fast, slow = row("marlin", 16, 50, weight_bytes=9), row("triton", 16, 90, weight_bytes=9)
    with Store.open(place / "sweep.db") as store:
        store.add_measurements([fast, slow])
        store.add_decision(decided(fast, 1, None, runner_up=slow.candidate), GPU, COLD)
    other = results / "same-as-export"
    other.mkdir()
    db = str(place / "sweep.db")
    assert main(["export", "--db", db, "-o", str(other / "export.json")]) == 0
    (results / "empty").mkdir()
    index = results_index.make_index(results)
    text = index.read_text(encoding="utf-8")
    assert "Use marlin at 16 tokens: 50.0 us a call." in text
    assert "AMD EPYC" in text
    assert 'id="empty"' not in text
    for found in leads_somewhere(index):
        assert found.exists(), found
    for folder in ("some-gpu", "same-as-export", "amd-epyc-2-cores"):
        assert (results / folder / "report.html").stat().st_size > 10_000
        assert list((results / folder / "plots").glob("*.svg"))
    # Made again it is the same, so that a commit shows what really changed.
    again = results_index.make_index(results)
    assert again.read_text(encoding="utf-8") == text
    (place / "broken.json").write_text("{")
    assert results_index.main([str(results)]) == 1
    assert "broken.json" in capsys.readouterr().err
