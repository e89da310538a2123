"""``autosel pack`` as a user types it: shipping, checking, merging and installing packs."""

import json
import os
import shutil
from dataclasses import replace

import pytest

from autosel.device import detect, pretend
from autosel.packs import canary_results, content, places
from autosel.packs.model import FILE_NAME
from autosel.store import Store
from tests.layer.decided import candidate, store_times
from tests.packs.made import MACHINE, entry, pack, resealed
from tests.packs.test_grade import with_version

CHECKPOINT = "ct-w4-g128-sym-mixtral"


@pytest.fixture(autouse=True)
def _own_places(tmp_path, monkeypatch):
    """Nothing of the site's or the project's own results takes part."""
    monkeypatch.setenv("AUTOSEL_SITE_DB", str(tmp_path / "nowhere" / "autosel.db"))
    monkeypatch.delenv("AUTOSEL_PACK_KEY", raising=False)
    monkeypatch.setattr(places, "built_in", lambda: tuple(sorted((tmp_path / "builtin").glob("*"))))
    monkeypatch.setattr(canary_results, "_memory", {})


PRESET = ("granite-3-1b-a400m", "--experts", "4")


@pytest.fixture
def checkpoint(carried_dir, tmp_path):
    target = tmp_path / "models" / "Tiny-Mixtral"
    shutil.copytree(carried_dir / "checkpoints" / CHECKPOINT, target)
    return target


@pytest.fixture
def measured(checkpoint, tmp_path, monkeypatch):
    """The checkpoint's layers as if they had been swept here; returns the folder."""
    from autosel.checkpoint import Checkpoint

    monkeypatch.setenv("AUTOSEL_DB", str(tmp_path / "autosel.db"))
    device = detect("cpu")
    with Store.open() as store:
        for layer in Checkpoint.open(checkpoint).layers:
            if layer.problem is not None:
                names = ("torch_int4", "emulation")
                found = [candidate(name, layer.problem, device) for name in names]
                times = {m: {found[0]: 10.0 * m, found[1]: 90.0 * m} for m in (1, 16)}
                store_times(store, layer.problem, device, times)
    return checkpoint


def test_the_short_form_and_the_long_one_write_the_same(autosel, measured, tmp_path):
    out = tmp_path / "a.json"
    ran = autosel("pack", measured, "-o", out)
    assert ran.status == 0, ran.err
    assert "decisions for Tiny-Mixtral" in ran.out
    again = autosel("pack", "create", measured, "-o", tmp_path / "b.json", "--json")
    first, second = content.read(out), content.read(tmp_path / "b.json")
    assert [e.decisions for e in first.entries] == [e.decisions for e in second.entries]
    assert again.json["sha256"] == second.sha256
    assert autosel("pack", "-o", tmp_path / "c.json", measured).status == 0


def test_what_a_pack_says_of_its_making(autosel, measured, tmp_path):
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out, "--samples")
    made = content.read(out)
    (model,) = made.models
    assert model.name == "Tiny-Mixtral"
    assert model.kind == "checkpoint"
    assert model.model_type == "mixtral"
    assert len(model.quantization_sha256) == len(model.shapes_sha256) == 64
    (source,) = made.sources
    assert source.device == detect("cpu")
    assert source.command == "autosel pack Tiny-Mixtral --samples"
    assert source.commit is None or len(source.commit) == 40
    # Nothing tells where the model or the database lay.
    assert str(tmp_path) not in out.read_text()
    assert all(len(m.row.times_us) == 25 for e in made.entries for m in e.measured)


def test_the_hash_of_the_quantisation_follows_the_config(autosel, measured, tmp_path):
    autosel("pack", measured, "-o", tmp_path / "a.json")
    path = measured / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["note"] = "changed"
    path.write_text(json.dumps(config))
    autosel("pack", measured, "-o", tmp_path / "b.json")
    one, two = (content.read(tmp_path / f"{n}.json").models[0] for n in "ab")
    assert one.quantization_sha256 != two.quantization_sha256
    assert one.shapes_sha256 == two.shapes_sha256


def test_nothing_stored_is_refused_and_nothing_written(autosel, checkpoint, tmp_path):
    ran = autosel("pack", checkpoint, "-o", tmp_path / "a.json")
    assert ran.status == 1
    assert "autosel sweep makes them" in ran.error
    assert not (tmp_path / "a.json").exists()


def test_results_of_another_device_are_packed_only_when_asked_for(autosel, measured, tmp_path):
    out = tmp_path / "a.json"
    other = replace(detect("cpu"), name="another")
    with pretend(other):
        assert autosel("pack", measured, "-o", out).status == 1
        assert autosel("pack", measured, "-o", out, "--all-devices").status == 0
    assert content.read(out).entries[0].device == detect("cpu")


def test_sign_verify_and_openssl_keys(autosel, measured, tmp_path):
    from tests.packs.test_signing import keys

    private, public = keys(tmp_path)
    _, other = keys(tmp_path, "other")
    out = tmp_path / "a.json"
    assert autosel("pack", measured, "-o", out, "--sign", private).status == 0
    ran = autosel("pack", "verify", out, "--key", public, "--json")
    assert ran.status == 0
    assert ran.json["signature_checked"] is True
    assert ran.json["grade"] == "exact"
    assert "not checked" in autosel("pack", "verify", out).out
    assert "signature" in autosel("pack", "verify", out, "--key", other).error
    assert "signature" in autosel("pack", "install", out, "--key", other).error
    assert autosel("pack", "verify", tmp_path / "missing").status == 1
    assert autosel("pack", "verify", out, "--key", tmp_path / "no").status == 2


def test_verify_knows_model_and_grade(autosel, measured, tmp_path):
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    assert autosel("pack", "verify", out, "--model", measured, "--grade", "exact").status == 0
    ran = autosel("pack", "verify", out, "--model", PRESET[0])
    assert "layers: found" in ran.error
    with pretend(replace(detect("cpu"), threads=77)):
        ran = autosel("pack", "verify", out, "--grade", "compatible")
        assert "device.threads" in ran.error
        ran = autosel("pack", "verify", out, "--json")
        assert ran.json["grade"] == "foreign"


def test_inspect_shows_grade_origin_and_decisions(autosel, tmp_path):
    content.write(pack(), tmp_path / "p.json")
    with pretend(with_version(MACHINE, "torch", "2.9.2+cu128")):
        ran = autosel("pack", "inspect", tmp_path / "p.json", "--decisions")
    assert ran.status == 0
    for word in ("NVIDIA H200", "compatible", "Tiny-MoE-GPTQ", "1-16", "2.9.1+cu128", "quick"):
        assert word in ran.out, word
    assert "versions.torch: made with 2.9.1+cu128, here 2.9.2+cu128" in ran.out


def test_inspect_looks_at_what_may_not_be_used(autosel, tmp_path):
    content.write(pack(), tmp_path / "p.json")  # of backends that are not registered here
    ran = autosel("pack", "inspect", tmp_path / "p.json", "--json")
    assert ran.status == 0
    assert ran.json["unknown_backends"] == ["quick", "steady"]
    assert "unknown backends quick, steady" in autosel("pack", "inspect", tmp_path / "p.json").out
    for words in (("verify",), ("install",)):
        ran = autosel("pack", *words, tmp_path / "p.json")
        assert ran.status == 1
        assert "quick, steady" in ran.error


def test_content_is_what_is_hashed(autosel, tmp_path):
    import hashlib

    content.write(pack(), tmp_path / "p.json")
    autosel("pack", "inspect", tmp_path / "p.json", "--content", tmp_path / "body")
    raw = (tmp_path / "body").read_bytes()
    assert hashlib.sha256(raw).hexdigest() == pack().sha256


HOSTILE = {
    "huge": lambda: b" " * (33 << 20),
    "deep": lambda: b"[" * 1_000_000,
    "a newer version": lambda: resealed({**json.loads(content.to_bytes(pack())), "version": 2}),
    "NaN": lambda: b'{"format":"autosel-pack","version":NaN}',
    "escapes": lambda: b'{"\x1b[2J":1}',
    "an escaped escape": lambda: b'{"format":"\\u001b[2J"}',
    "not a pack": lambda: b'{"a":1}',
    "a pickle": lambda: b"\x80\x04K\x01.",
    "nothing": lambda: b"",
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("verb", ["inspect", "verify", "install", "diff", "merge"])
def test_hostile_files_get_one_line_from_every_command(autosel, tmp_path, what, verb):
    path = tmp_path / "p.json"
    path.write_bytes(HOSTILE[what]())
    before = sorted(os.listdir(tmp_path))
    words = {"diff": (path, path), "merge": (path, "-o", tmp_path / "out.json")}
    ran = autosel("pack", verb, *words.get(verb, (path,)))
    assert ran.status == 1
    assert ran.out == ""
    assert ran.error.isprintable()
    assert str(path) in ran.error
    after = set(os.listdir(tmp_path)) - {"autosel.db", "autosel.db-wal", "autosel.db-shm"}
    assert after <= set(before)


def test_merge_of_two_devices_and_its_conflicts(autosel, tmp_path):
    other = replace(MACHINE, name="NVIDIA H100")
    content.write(pack(), tmp_path / "a.json")
    content.write(pack(entry(other)), tmp_path / "b.json")
    out = tmp_path / "both.json"
    assert autosel("pack", "merge", tmp_path / "a.json", tmp_path / "b.json", "-o", out).status == 0
    both = content.read(out)
    assert {e.device.name for e in both.entries} == {"NVIDIA H200", "NVIDIA H100"}
    assert len(both.models) == 1
    # The same pack twice is no conflict; another result about the same thing is one.
    assert autosel("pack", "merge", out, tmp_path / "a.json", "-o", tmp_path / "c.json").status == 0
    later = entry(winner=entry().decisions[0].runner_up, other=entry().decisions[0].winner)
    content.write(pack(replace(later, decided="2026-02-01T00:00:00Z")), tmp_path / "d.json")
    words = ("pack", "merge", tmp_path / "a.json", tmp_path / "d.json", "-o", tmp_path / "e.json")
    ran = autosel(*words)
    assert ran.status == 1
    assert "1 conflicts" in ran.error
    assert not (tmp_path / "e.json").exists()
    for prefer, winner in (("newest", "steady"), ("first", "quick"), ("last", "steady")):
        ran = autosel(*words, "--prefer", prefer, "--json")
        assert ran.status == 0
        assert len(ran.json["conflicts"]) == 1
        (found,) = content.read(tmp_path / "e.json").entries
        assert found.decisions[0].winner.backend == winner


def test_diff_names_what_changed(autosel, tmp_path):
    content.write(pack(), tmp_path / "a.json")
    assert "no difference" in autosel("pack", "diff", *[tmp_path / "a.json"] * 2).out
    device = with_version(MACHINE, "torch", "2.9.2+cu128")
    first = entry().decisions[0]
    flipped = entry(device, winner=first.runner_up, other=first.winner)
    content.write(pack(flipped), tmp_path / "b.json")
    words = ("pack", "diff", tmp_path / "a.json", tmp_path / "b.json")
    ran = autosel(*words, "--json", "--exit-code")
    assert ran.status == 1
    kinds = [item["kind"] for item in ran.json["changes"]]
    assert kinds == ["machine", "winner", "winner"]
    assert ran.json["changes"][0]["first"] == "versions.torch=2.9.1+cu128"
    assert ran.json["changes"][1]["tokens"] == "1-16"
    assert autosel(*words).status == 0
    content.write(pack(entry(replace(MACHINE, name="NVIDIA H100"))), tmp_path / "c.json")
    ran = autosel("pack", "diff", tmp_path / "a.json", tmp_path / "c.json", "--json")
    assert [c["kind"] for c in ran.json["changes"]] == ["only in first", "only in second"]


def test_install_beside_a_model_and_nothing_is_overwritten(autosel, measured, tmp_path):
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    place = measured / FILE_NAME
    assert autosel("pack", "install", out, measured).status == 0
    assert content.read(place) == content.read(out)
    assert autosel("pack", "install", out, measured).status == 0  # the same: nothing to do
    autosel("pack", measured, "-o", tmp_path / "b.json", "--samples")
    ran = autosel("pack", "install", tmp_path / "b.json", measured)
    assert "--force replaces it" in ran.error
    assert content.read(place) == content.read(out)
    assert autosel("pack", "install", tmp_path / "b.json", measured, "--force").status == 0
    assert content.read(place) == content.read(tmp_path / "b.json")
    left = [p.name for p in measured.iterdir() if p.name.startswith(".autosel")]
    assert left == []


def test_install_refuses_a_pack_of_another_model(autosel, measured, tmp_path):
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    config = json.loads((measured / "config.json").read_text())
    config["quantization_config"]["note"] = "another"
    (measured / "config.json").write_text(json.dumps(config))
    ran = autosel("pack", "install", out, measured)
    assert "hash of the quantisation settings" in ran.error
    assert not (measured / FILE_NAME).exists()


def test_install_follows_no_link_out_of_the_folder(autosel, measured, tmp_path):
    """A link in the model's folder is replaced; what it leads to stays as it is."""
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (measured / FILE_NAME).symlink_to(precious)
    assert autosel("pack", "install", out, measured).status == 1
    assert autosel("pack", "install", out, measured, "--force").status == 0
    assert precious.read_text() == "mine"
    assert not (measured / FILE_NAME).is_symlink()
    assert content.read(measured / FILE_NAME) == content.read(out)


def test_install_for_the_user_and_the_site(autosel, measured, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOSEL_SITE_DB", str(tmp_path / "site" / "autosel.db"))
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    ran = autosel("pack", "install", out, "--json")
    assert ran.json["file"].startswith(str(tmp_path / "autosel-packs" / "Tiny-Mixtral-"))
    ran = autosel("pack", "install", out, "--site", "--json")
    assert ran.json["file"].startswith(str(tmp_path / "site" / "autosel-packs"))
    assert autosel("pack", "install", out, measured, "--site").status == 2
    assert autosel("pack", "install", out, "--db", ":memory:").status == 1


def test_a_model_name_never_leads_anywhere(autosel, tmp_path):
    from autosel.packs.build import folder_name, plain_name

    for text in ("../../etc", "..", ".", "a/b", "C:\\x", "a b\n", "", "-rf", "Ω", "\x1b[2J"):
        name = plain_name(text)
        assert name not in ("", ".", "..")
        assert "/" not in name
        assert "\\" not in name
        assert not name.startswith((".", "-"))
    snapshot = tmp_path / "models--org--Name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    assert folder_name(snapshot) == "org--Name"


def test_explain_answers_from_the_pack_beside_the_model(autosel, measured, tmp_path, monkeypatch):
    """Decisions travel: packed here, installed there, answered without a sweep."""
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    autosel("pack", "install", out, measured)
    fresh = ("--db", str(tmp_path / "fresh.db"))
    ran = autosel("explain", measured, "--tokens", "16", "--layer", "0", *fresh)
    assert ran.status == 0
    assert "pack of the model results" in ran.out
    assert "torch_int4" in ran.out
    ran = autosel("explain", measured, "--tokens", "16", "--layer", "0", "--json", *fresh)
    (answer,) = ran.json["answers"]
    assert answer["status"] == "tuned"
    assert answer["origin"]["tier"] == "model"
    assert answer["origin"]["grade"] == "exact"
    with pretend(replace(detect("cpu"), threads=77)):
        ran = autosel("explain", measured, "--tokens", "16", "--layer", "0", *fresh)
    assert "device.threads: made with" in ran.out
    assert "not used" in ran.out


H200 = replace(MACHINE, threads=None, flags=(), mig_slice=None)


def test_a_pretended_h200_is_answered_from_what_ships(autosel, tmp_path, monkeypatch):
    """As soon as a pack of a preset's layer is among the results, explain answers from it."""
    from autosel import presets
    from autosel.core import Candidate
    from autosel.packs import build
    from tests.packs.made import pack as packed

    problem = presets.get("qwen3-30b-a3b")
    from autosel import registry

    def default(name):
        backend = registry.get(name)
        params = backend.space(problem, 4, H200).default
        return Candidate.of(name, params, backend.layout(problem, params).key)

    made = entry(H200, problem, default("triton"), default("emulation"))
    about = build.model("qwen3-30b-a3b", "preset", [(problem, ())])
    folder = tmp_path / "builtin"
    folder.mkdir()
    content.write(packed(made, models=[about]), folder / "qwen3-30b-a3b.json")
    with pretend(H200):
        ran = autosel("explain", "qwen3-30b-a3b", "--tokens", "16")
        assert ran.status == 0
        assert "built-in results" in ran.out
        assert "triton" in ran.out
        ran = autosel("explain", "qwen3-30b-a3b", "--tokens", "16", "--json")
        (answer,) = ran.json["answers"]
        assert (answer["status"], answer["origin"]["tier"]) == ("tuned", "built-in")
    with pretend(replace(H200, name="NVIDIA B200")):
        ran = autosel("explain", "qwen3-30b-a3b", "--tokens", "16", "--json")
        (answer,) = ran.json["answers"]
        assert answer["status"] == "not tuned"
        assert answer["told"][0]["origin"]["grade"] == "foreign"


def test_check_runs_a_compatible_pack_once(autosel, measured, tmp_path, monkeypatch):
    from autosel.packs import canary
    from autosel.packs.canary_results import CanaryResult

    ran_for = []

    def run(entry, experts, device, **options):
        ran_for.append(entry.problem)
        return CanaryResult(
            True, "so it is", 0.1, "2026-01-31T12:00:00Z", {"1": {"winner_us": 1.0}}
        )

    monkeypatch.setattr(canary, "run", run)
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    autosel("pack", "install", out, measured)
    fresh = ("--layer", "0", "--db", str(tmp_path / "there" / "fresh.db"))
    ran = autosel("pack", "check", measured, *fresh)
    assert "no compatible pack" in ran.out
    versions = dict(detect("cpu").versions)
    release, _, local = versions["torch"].partition("+")
    major, minor, _ = release.split(".")[:3]
    patched = f"{major}.{minor}.99" + (f"+{local}" if local else "")
    with pretend(with_version(detect("cpu"), "torch", patched)):
        ran = autosel("explain", measured, "--tokens", "4", "--json", *fresh)
        assert ran.json["answers"][0]["status"] == "not tuned"
        assert autosel("pack", "check", measured, *fresh).status == 0
        assert len(ran_for) == 1
        assert "passed" in autosel("pack", "check", measured, *fresh).out
        assert len(ran_for) == 1
        ran = autosel("explain", measured, "--tokens", "4", "--json", *fresh)
        (answer,) = ran.json["answers"]
        assert answer["status"] == "tuned"
        assert answer["origin"]["grade"] == "compatible"
        autosel("pack", "check", measured, "--again", *fresh)
        assert len(ran_for) == 2


def test_list_shows_every_place_in_order(autosel, measured, tmp_path):
    assert autosel("pack", "list").out.strip() == "no packs"
    out = tmp_path / "a.json"
    autosel("pack", measured, "-o", out)
    autosel("pack", "install", out, measured)
    autosel("pack", "install", out)
    (tmp_path / "autosel-packs" / "bad.json").write_text("{")
    (tmp_path / "builtin").mkdir()
    content.write(pack(), tmp_path / "builtin" / "x.json")
    ran = autosel("pack", "list", measured, "--json")
    assert ran.status == 0
    found = {(item["tier"], item["grade"]) for item in ran.json["packs"]}
    assert found == {
        ("user", "exact"), ("user", "not used"), ("model", "exact"), ("built-in", "not used"),
    }  # fmt: skip
    with pretend(replace(detect("cpu"), threads=77)):
        ran = autosel("pack", "list", measured)
    assert "device.threads: made with" in ran.out
    assert "not valid JSON" in ran.out
