"""Which tier answers, what it is worth, and that nothing else decides."""

import json
import os
import stat
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest

from autosel import neighbours
from autosel.core import Candidate, TokenBucket
from autosel.decide import decide
from autosel.explanation import explain
from autosel.interfaces import Space
from autosel.packs import canary_results, content, library, signing
from autosel.packs.canary_results import CanaryResult
from autosel.packs.grade import bystanders
from autosel.store import Store
from autosel.tiers import open_tiers
from tests.fakes import PROBLEM, Clock, FakeBackend, registered
from tests.packs.made import FAST, MACHINE, MODE, SLOW, entry, pack, resealed, row, source
from tests.packs.test_grade import CHANGES, VERSIONS, with_version

PATCHED = with_version(MACHINE, "torch", "2.9.2+cu128")
STRANGE = replace(MACHINE, name="NVIDIA B200")
OTHERS = [Candidate.of(name, {}, "plain") for name in ("third", "fourth", "fifth")]


@pytest.fixture(autouse=True)
def _backends():
    names = ("quick", "steady", "third", "fourth", "fifth")
    with registered(**{name: FakeBackend(Clock()) for name in names}):
        yield


@contextmanager
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def put(tmp_path, tier, made, name="p.json"):
    """Lays a pack where a tier looks; returns its path."""
    folder = {
        "user": tmp_path / "user" / "autosel-packs",
        "site": tmp_path / "site" / "autosel-packs",
        "model": tmp_path / "model",
        "built-in": tmp_path / "builtin",
    }[tier]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("autosel-pack.json" if tier == "model" else name)
    content.write(made, path)
    return path


def fill(path, winner, device=MACHINE):
    path.parent.mkdir(parents=True, exist_ok=True)
    with Store.open(path) as store:
        rows = [row(winner, 10.0, 4, device), row(SLOW, 30.0, 4, device)]
        store.add_measurements(rows)
        store.add_decision(decide(rows, bucket=TokenBucket(1, None, 4)), device, MODE)


def ask(tmp_path, device=MACHINE, tokens=4, problem=PROBLEM, **options):
    with open_tiers(model=tmp_path / "model") as tiers:
        answers = tiers.answers(problem, device, **options)
    return answers, answers.find(tokens)


ORDER = ("user database", "user", "site database", "site", "model", "built-in")


def test_later_tiers_win(tmp_path):
    """One tier after the other is taken away; the next one answers."""
    winners = dict(zip(ORDER, [*OTHERS, FAST, OTHERS[0], OTHERS[1]], strict=True))
    paths = {}
    for name in ("user", "site", "model", "built-in"):
        paths[name] = put(tmp_path, name, pack(entry(winner=winners[name])))
    for name in ("user", "site"):
        path = tmp_path / name / "autosel.db"
        fill(path, winners[f"{name} database"])
        paths[f"{name} database"] = path
    for name in ORDER:
        _, found = ask(tmp_path)
        assert found.origin.tier == name.split()[0]
        assert found.decision.winner == winners[name], name
        assert found.origin.graded.grade == "exact"
        assert found.origin.proven
        if not name.startswith("user"):
            assert str(paths[name]) == found.origin.place
        paths[name].unlink()
    assert ask(tmp_path)[1] is None


def test_a_tier_fills_what_the_one_above_leaves_open(tmp_path):
    path = tmp_path / "user" / "autosel.db"
    path.parent.mkdir()
    with Store.open(path) as store:
        rows = [row(OTHERS[0], 10.0, 4), row(SLOW, 30.0, 4)]
        store.add_decision(decide(rows, bucket=TokenBucket(1, 8, 4)), MACHINE, MODE)
    put(tmp_path, "built-in", pack())
    answers, _ = ask(tmp_path)
    table = [(d.bucket.label, d.winner.backend) for d in answers.decisions()]
    assert table == [("1-8", "third"), ("9-16", "quick"), ("17-64", "quick")]
    assert answers.find(100) is None


@pytest.mark.parametrize("tier", ["user", "site", "model", "built-in"])
@pytest.mark.parametrize(
    ("device", "grade"), [(MACHINE, "exact"), (PATCHED, "compatible"), (STRANGE, "foreign")]
)
def test_only_what_is_exact_decides(tmp_path, tier, device, grade):
    put(tmp_path, tier, pack())
    answers, found = ask(tmp_path, device)
    counts = tuple(
        sum(a.entry is not None for a in group)
        for group in (answers.usable, answers.unproven, answers.foreign)
    )
    expected = {"exact": (1, 0, 0), "compatible": (0, 1, 0), "foreign": (0, 0, 1)}[grade]
    assert counts == expected
    assert (found is not None) == (grade == "exact")
    if grade != "exact":
        (told,) = answers.told(4)
        assert told.decision.winner == FAST
        assert told.origin.graded.grade == grade
        assert not told.origin.proven
        assert told.origin.note


@pytest.mark.parametrize(("field", "value", "expected"), CHANGES)
def test_every_single_field_through_the_tiers(tmp_path, field, value, expected):
    put(tmp_path, "model", pack())
    answers, found = ask(tmp_path, replace(MACHINE, **{field: value}))
    assert found is None
    group = answers.unproven if expected == "compatible" else answers.foreign
    assert [d.field for d in group[0].origin.graded.differences] == [f"device.{field}"]


@pytest.mark.parametrize(("package", "version", "expected"), VERSIONS)
def test_every_single_version_through_the_tiers(tmp_path, package, version, expected):
    put(tmp_path, "built-in", pack())
    answers, found = ask(tmp_path, with_version(MACHINE, package, version))
    assert found is None
    if package in bystanders(entry()):  # the winner there runs on none of these
        expected = "compatible"
    assert len(answers.unproven) == (expected == "compatible")
    assert len(answers.foreign) == (expected == "foreign")


@pytest.mark.parametrize("passed", [True, False])
def test_a_compatible_pack_decides_after_its_check_and_only_then(tmp_path, passed):
    put(tmp_path, "model", pack())
    made = pack()
    database = tmp_path / "user" / "autosel.db"
    result = CanaryResult(passed, "said the check", 1.0, "2026-01-31T12:00:00Z", {})
    canary_results.keep(database, made.sha256, made.entries[0], PATCHED, result)
    answers, found = ask(tmp_path, PATCHED)
    if passed:
        assert found.decision.winner == FAST
        assert found.origin.graded.grade == "compatible"
    else:
        assert found is None
        assert answers.unproven[0].origin.note == "said the check"
    # Another machine that is compatible as well has its own check.
    assert ask(tmp_path, with_version(MACHINE, "torch", "2.9.3+cu128"))[1] is None
    # Another pack, or another content of this one, has its own check.
    put(tmp_path, "model", pack(entry(decided="2026-01-30T09:00:00Z")))
    assert ask(tmp_path, PATCHED)[1] is None


def test_a_forged_or_damaged_result_of_a_check_does_not_count(tmp_path):
    put(tmp_path, "model", pack())
    database = tmp_path / "user" / "autosel.db"
    result = CanaryResult(True, "fine", 1.0, "2026-01-31T12:00:00Z", {})
    made = pack()
    canary_results.keep(database, made.sha256, made.entries[0], PATCHED, result)
    canary_results._memory.clear()
    (path,) = (tmp_path / "user" / "autosel-packs" / "checks").iterdir()
    values = json.loads(path.read_text())
    for change in ({"key": "0" * 64}, {"passed": 1}, {"why": "\x1b[2J"}, {"extra": 1}):
        path.write_text(json.dumps({**values, **change}))
        with pytest.warns(library.PackWarning, match="result of a check not used"):
            assert ask(tmp_path, PATCHED)[1] is None


def test_other_layers_routings_and_ways_of_timing_are_not_answered(tmp_path):
    put(tmp_path, "model", pack())
    assert ask(tmp_path)[1] is not None
    assert ask(tmp_path, problem=replace(PROBLEM, top_k=1))[1] is None
    assert ask(tmp_path, routing="zipf")[1] is None
    assert ask(tmp_path, timing=(("cache", "hot"),))[1] is None
    assert ask(tmp_path, replace(MACHINE, name=" "))[1] is None


@pytest.mark.parametrize("samples", [True, False])
def test_a8_winners_need_leave(tmp_path, samples):
    a8 = entry(samples=samples)
    measured = tuple(
        replace(m, row=replace(m.row, accuracy="a8")) if m.row.candidate == FAST else m
        for m in a8.measured
    )
    decisions = tuple(replace(d, accuracy="a8") for d in a8.decisions)
    put(tmp_path, "model", pack(replace(a8, decisions=decisions, measured=measured)))
    assert ask(tmp_path)[1].decision.winner == SLOW
    assert ask(tmp_path, allow_a8=True)[1].decision.winner == FAST


@pytest.mark.parametrize("samples", [True, False])
def test_a_winner_that_failed_here_is_not_chosen_from_a_pack(tmp_path, samples):
    put(tmp_path, "model", pack(entry(samples=samples)))
    path = tmp_path / "user" / "autosel.db"
    path.parent.mkdir(exist_ok=True)
    failure = row(status="failed", reason="it raised", times_us=(), errors=None, timing=())
    with Store.open(path) as store:
        store.add_measurement(failure)
    answers, found = ask(tmp_path)
    assert found.decision.winner == SLOW
    assert answers.find(32).decision.winner == FAST  # it failed at 4 tokens


REFUSED = {
    "unknown backend": lambda: resealed(
        json.loads(content.to_bytes(pack(entry(winner=Candidate.of("alien", {}, "plain")))))
    ),
    "damage": lambda: content.to_bytes(pack())[:-40],
    "a changed letter": lambda: content.to_bytes(pack()).replace(b"faster", b"slower", 1),
}


@pytest.mark.parametrize("tier", ["user", "site", "model", "built-in"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_pack_is_refused_whole_with_one_line(tmp_path, tier, what):
    put(tmp_path, tier, pack()).write_bytes(REFUSED[what]())
    with pytest.warns(library.PackWarning) as caught:
        answers, found = ask(tmp_path)
    assert found is None
    assert not answers.unproven and not answers.foreign  # noqa: PT018
    (line,) = [str(w.message) for w in caught]
    assert line.startswith("pack not used: ")
    assert line.isprintable()


@pytest.mark.parametrize(
    ("params", "layout", "word"),
    [
        ({"BLOCK": 32}, "plain", "no parameter BLOCK"),
        ({}, "other", "layout"),
    ],
)
def test_parameters_that_the_backend_would_not_propose_never_run(tmp_path, params, layout, word):
    put(tmp_path, "model", pack(entry(winner=Candidate.of("quick", params, layout))))
    answers, found = ask(tmp_path)
    assert found is None
    assert not answers.decisions()
    (told,) = answers.told(4)  # exact, and still not believed
    assert word in told.origin.note


def test_packs_that_must_be_signed(tmp_path, monkeypatch):
    from tests.packs.test_signing import keys

    private, public = keys(tmp_path)
    path = put(tmp_path, "model", pack())
    monkeypatch.setenv("AUTOSEL_PACK_KEY", str(public))
    with pytest.warns(library.PackWarning, match="signature: found none"):
        assert ask(tmp_path)[1] is None
    path.unlink()
    content.write(signing.sign(pack(), private), path)
    with no_warnings():
        assert ask(tmp_path)[1] is not None
    monkeypatch.setenv("AUTOSEL_PACK_KEY", str(tmp_path / "missing.pem"))
    with pytest.warns(library.PackWarning, match="key: found No such file"):
        assert ask(tmp_path)[1] is None


def test_built_in_packs_come_with_the_program_and_need_no_signature(tmp_path, monkeypatch):
    from tests.packs.test_signing import keys

    put(tmp_path, "built-in", pack())
    monkeypatch.setenv("AUTOSEL_PACK_KEY", str(keys(tmp_path)[1]))
    assert ask(tmp_path)[1] is not None


def test_the_sites_database_is_read_and_never_written(tmp_path):
    path = tmp_path / "site" / "autosel.db"
    fill(path, FAST)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in path.parent.iterdir()}
    _, found = ask(tmp_path)
    assert found.origin.tier == "site"
    after = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in path.parent.iterdir()}
    assert after == before


def test_the_sites_database_in_a_folder_that_cannot_be_written(tmp_path):
    path = tmp_path / "site" / "autosel.db"
    fill(path, FAST)
    path.chmod(stat.S_IRUSR)
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert ask(tmp_path)[1].origin.tier == "site"
    finally:
        path.parent.chmod(0o755)


@pytest.mark.parametrize("content_", [b"", b"not a database", b"SQLite format 3\x00" + b"x" * 100])
def test_a_site_database_that_is_none_costs_one_warning(tmp_path, content_):
    path = tmp_path / "site" / "autosel.db"
    path.parent.mkdir()
    path.write_bytes(content_)
    put(tmp_path, "model", pack())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ask(tmp_path)[1].origin.tier == "model"
    assert len(caught) <= 1
    assert path.read_bytes() == content_


def test_no_place_exists(tmp_path):
    with no_warnings():
        assert ask(tmp_path)[1] is None
    assert not (tmp_path / "site").exists()


def test_installed_packs_newest_first(tmp_path):
    old = put(tmp_path, "user", pack(entry(winner=OTHERS[0])), "a.json")
    new = put(tmp_path, "user", pack(entry(winner=OTHERS[1])), "b.json")
    os.utime(old, (1, 1))
    assert ask(tmp_path)[1].decision.winner == OTHERS[1]
    os.utime(new, (0, 0))
    assert ask(tmp_path)[1].decision.winner == OTHERS[0]


def test_seeds_for_a_search_come_from_foreign_packs_too(tmp_path):
    put(tmp_path, "model", pack())
    answers, _ = ask(tmp_path, STRANGE)
    assert answers.seeds("quick", 4) == [({}, 4)]
    assert answers.seeds("marlin", 4) == []
    assert answers.seeds("quick", 16) == [({}, 4)]  # a bucket's settings are those of its count


class Growing(FakeBackend):
    """Its rows are four for a token, unless a setting says otherwise."""

    def space(self, problem, num_tokens, device):
        rows = tuple(num_tokens * factor for factor in (4, 1, 2, 8, 16))
        return Space({"rows": rows[0]}, {"rows": rows}, relative=("rows",))


def test_seeds_from_packs_grow_with_the_call(tmp_path):
    winner = Candidate.of("growing", {"rows": 32}, "plain")  # twice its own at 4 tokens
    put(tmp_path, "user", pack(entry(winner=winner)))
    fake = Growing(Clock())
    with registered(growing=fake), Store.open(tmp_path / "user" / "autosel.db") as store:
        found = [
            neighbours.known_good(store, fake, PROBLEM, MACHINE, tokens) for tokens in (4, 12, 64)
        ]
        assert found == [[{"rows": 32}], [{"rows": 96}], [{"rows": 64}]]  # 32 tokens have their own
        store.add_measurements(
            [row(winner), row(Candidate.of("growing", {"rows": 16}, "plain"), 11)]
        )
        again = neighbours.known_good(store, fake, PROBLEM, MACHINE, 8)
    assert again == [{"rows": 64}, {"rows": 32}]  # each once, the pack's first


def explained(tmp_path, device=MACHINE, tokens=4, problem=PROBLEM):
    with open_tiers(model=tmp_path / "model") as tiers:
        return explain(tiers, problem, device, tokens)


def test_explain_names_tier_and_grade(tmp_path):
    path = put(tmp_path, "built-in", pack())
    answer = explained(tmp_path)
    assert answer.status == "tuned"
    assert answer.used == FAST
    assert answer.origin.tier == "built-in"
    assert str(path) in answer.origin.text
    assert answer.to_dict()["origin"]["grade"] == "exact"
    assert answer.measured == "2026-01-30T08:00:00.123456Z"
    json.dumps(answer.to_dict(), allow_nan=False)


@pytest.mark.parametrize(("device", "grade"), [(PATCHED, "compatible"), (STRANGE, "foreign")])
def test_explain_tells_what_does_not_decide_and_names_every_field(tmp_path, device, grade):
    """SEC-6: a pack for another device is not applied, and the differences are listed."""
    put(tmp_path, "model", pack())
    device = replace(device, driver="570.124.06")
    answer = explained(tmp_path, device)
    assert answer.status == "not tuned"
    assert answer.used != FAST
    assert answer.decision is None
    (told,) = answer.told
    assert told.origin.graded.grade == grade
    fields = {item.field for item in told.origin.graded.differences}
    changed = "versions.torch" if grade == "compatible" else "device.name"
    assert fields == {"device.driver", changed}
    assert {d.field for d in answer.nearest.differences} >= {
        "versions.driver", changed if grade == "foreign" else "versions.torch",
    }  # fmt: skip
    json.dumps(answer.to_dict(), allow_nan=False)


def test_explain_of_a_layer_that_no_pack_has(tmp_path):
    put(tmp_path, "model", pack())
    answer = explained(tmp_path, problem=replace(PROBLEM, top_k=1))
    assert answer.status == "not tuned"
    assert answer.told == ()
    assert [d.field for d in answer.nearest.differences] == ["top_k"]


def test_explain_asks_the_users_database_first(tmp_path):
    put(tmp_path, "model", pack())
    fill(tmp_path / "user" / "autosel.db", OTHERS[0])
    answer = explained(tmp_path)
    assert answer.used == OTHERS[0]
    assert answer.origin is None


def test_without_the_signature_of_samples_a_pack_still_answers(tmp_path):
    put(tmp_path, "model", pack(entry(samples=False)))
    answer = explained(tmp_path)
    assert answer.used == FAST
    assert answer.rejected


def test_what_ships_is_not_graded_by_the_number_of_its_version(tmp_path, monkeypatch):
    """A release changes the version and not the kernels; other people's packs are another thing."""
    import autosel

    monkeypatch.setattr(autosel, "__version__", "7.0.0")
    made = pack(entry(source=source(autosel_version="6.0.0")))
    path = put(tmp_path, "built-in", made)
    assert ask(tmp_path)[1].origin.graded.grade == "exact"
    kernels = with_version(MACHINE, "autosel-kernels", "sha256:ffffffffffffffffffff")
    assert ask(tmp_path, kernels)[1] is None
    path.unlink()
    put(tmp_path, "model", made)
    answers, found = ask(tmp_path)
    assert found is None
    (differs,) = answers.foreign[0].origin.graded.differences
    assert differs.field == "autosel.version"
