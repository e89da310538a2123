"""Files from strangers are refused whole, in one line, whatever they are."""

import copy
import json
import os
import pickle
import time
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.errors import PackError
from autosel.packs import content, strict_json
from tests.packs.made import data, pack, resealed

ESC = "\x1b[31m"


def put(path, value):
    """A change of the values under ``path`` (keys and places)."""

    def change(values):
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value(inner[path[-1]]) if callable(value) else value

    return change


def drop(*path):
    def change(values):
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]

    return change


ENTRY = ("entries", 0)
OUTCOME = (*ENTRY, "outcomes", 0)
MEASURED = (*ENTRY, "measurements", 0)
CANDIDATE = ("candidates", 0)
DEVICE = ("sources", 0, "device")

#: What a careful forger may write, with a hash that fits: name, change, a word of the message.
CHANGES = [
    ("another format", put(["format"], "autosel-export"), "format"),
    ("a newer version", put(["version"], 2), "newer autosel"),
    ("an older version", put(["version"], 0), "version"),
    ("a version as text", put(["version"], "1"), "version"),
    ("a version as truth", put(["version"], True), "version"),
    ("an unknown key", put(["extra"], 1), "known key"),
    ("a missing list", drop("entries"), "entries"),
    ("a list that is an object", put(["entries"], {}), "a list"),
    ("an entry that is a list", put(ENTRY, []), "an object"),
    ("a place too far", put([*OUTCOME, "winner"], 99), "winner"),
    ("a place below", put([*OUTCOME, "winner"], -1), "winner"),
    ("a place as truth", put([*OUTCOME, "winner"], True), "winner"),
    ("a place as a fraction", put([*OUTCOME, "winner"], 0.0), "winner"),
    ("the winner as runner-up", put([*OUTCOME, "runner_up"], 0), "runner_up"),
    ("no time", put([*OUTCOME, "winner_us"], 0), "a number from 0.001 to"),
    ("less than a clock cycle", put([*OUTCOME, "winner_us"], 5e-324), "found 5e-324, expected"),
    ("a sample of nothing", put([*MEASURED, "times_us", 3], 5e-324), "times_us[3]: value: found"),
    ("an estimate of nothing", put([*MEASURED, "summary", "estimate_us"], 1e-9), "estimate_us"),
    ("a minimum of nothing", put([*MEASURED, "summary", "min_us"], 1e-9), "min_us"),
    ("a negative time", put([*OUTCOME, "winner_us"], -1.5), "winner_us"),
    ("a time of years", put([*OUTCOME, "winner_us"], 1e15), "winner_us"),
    ("a time as text", put([*OUTCOME, "winner_us"], "10"), "winner_us"),
    ("a negative sample", put([*MEASURED, "times_us", 3], -1), "times_us"),
    ("a sample as text", put([*MEASURED, "times_us", 3], "1"), "times_us"),
    ("an interval upside down", put([*OUTCOME, "margin_interval"], [0.5, 0.1]), "margin_interval"),
    ("an interval of three", put([*OUTCOME, "margin_interval"], [0, 1, 2]), "margin_interval"),
    ("a tie as a number", put([*OUTCOME, "tie"], 0), "tie"),
    ("an unknown status", put([*OUTCOME, "rejected", 0, "status"], "fine"), "rejected[0]"),
    ("an unknown accuracy", put([*OUTCOME, "accuracy"], "great"), "accuracy"),
    ("a gap", put([*OUTCOME, "bucket", "high"], 15), "gap"),
    ("an overlap", put([*OUTCOME, "bucket", "high"], 17), "overlap"),
    ("a late start", put([*OUTCOME, "bucket", "low"], 2), "gap"),
    ("a closed end", put([*ENTRY, "outcomes", 2, "bucket", "high"], 100), "open last bucket"),
    ("two open ends", put([*OUTCOME, "bucket", "high"], None), "overlap"),
    ("a bucket upside down", put([*OUTCOME, "bucket", "low"], 20), "high"),
    ("a bucket at 0", put([*OUTCOME, "bucket", "low"], 0), "low"),
    ("no outcomes", put([*ENTRY, "outcomes"], []), "gap"),
    ("the same twice", put(["entries"], lambda found: found * 2), "twice"),
    ("code in a parameter", put([*CANDIDATE, "params"], {"x": "__import__('os')"}), "plain name"),
    ("a list in a parameter", put([*CANDIDATE, "params"], {"x": [1]}), "params.x"),
    ("an object in a parameter", put([*CANDIDATE, "params"], {"x": {"y": 1}}), "params.x"),
    ("a long parameter", put([*CANDIDATE, "params"], {"x": "a" * 129}), "params.x"),
    ("many parameters", put([*CANDIDATE, "params"], {f"p{i}": i for i in range(65)}), "params"),
    ("a path as parameter", put([*CANDIDATE, "params"], {"x": "/etc/passwd"}), "params.x"),
    ("a path as parameter name", put([*CANDIDATE, "params"], {"../x": 1}), "plain name"),
    ("a dunder path", put([*CANDIDATE, "params"], {"x": "a..b"}), "plain name"),
    ("a backend that is a path", put([*CANDIDATE, "backend"], "../../evil"), "plain name"),
    ("a backend that is a module", put([*CANDIDATE, "backend"], "os;system"), "plain name"),
    ("an absolute backend", put([*CANDIDATE, "backend"], "/tmp/evil"), "plain name"),
    ("a backend with a space", put([*CANDIDATE, "backend"], "mar lin"), "plain name"),
    ("a look-alike letter", put([*CANDIDATE, "backend"], "mаrlin"), "plain name"),
    ("a full-width name", put([*CANDIDATE, "backend"], "ｍarlin"), "plain name"),
    ("an invisible letter", put([*CANDIDATE, "backend"], "marlin\u200b"), "plain name"),
    ("a name with a line break", put([*CANDIDATE, "backend"], "marlin\n"), "plain name"),
    ("an empty backend", put([*CANDIDATE, "backend"], ""), "plain name"),
    ("a layout that climbs", put([*CANDIDATE, "layout"], "a/../b"), "layout"),
    ("a model that climbs", put(["models", 0, "name"], "../../etc"), "name"),
    ("a backslash", put(["models", 0, "name"], "..\\x"), "name"),
    ("a dot", put(["models", 0, "name"], ".."), "name"),
    ("a drive", put(["models", 0, "name"], "C:\\x"), "name"),
    ("routing that climbs", put([*ENTRY, "routing"], "../x"), "routing"),
    ("an unknown setting", put([*ENTRY, "timing"], {"speed": "fast"}), "timing"),
    ("a terminal escape", put([*OUTCOME, "why"], f"{ESC}fine"), "printable"),
    ("an escape in a device", put([*DEVICE, "name"], f"H200{ESC}"), "printable"),
    ("a bell in a command", put(["sources", 0, "command"], "a\x07b"), "printable"),
    ("a line break", put([*OUTCOME, "why"], "a\nb"), "printable"),
    ("text turned round", put([*OUTCOME, "why"], "a\u202eb"), "printable"),
    ("half a letter", put([*OUTCOME, "why"], "\ud800"), "UTF-8"),
    ("a long text", put([*OUTCOME, "why"], "a" * 4001), "characters"),
    ("a huge number", put([*MEASURED, "weight_bytes"], 2**63), "weight_bytes"),
    ("a huge parameter", put([*CANDIDATE, "params"], {"x": 2**63}), "params.x"),
    ("a huge number in a plan", put([*ENTRY, "plan"], {"x": -(2**64)}), "plan.x"),
    ("a negative size", put([*MEASURED, "weight_bytes"], -1), "weight_bytes"),
    ("a size with a fraction", put([*MEASURED, "weight_bytes"], 1.5), "weight_bytes"),
    ("tokens beyond 31 bits", put([*MEASURED, "num_tokens"], 2**31), "num_tokens"),
    ("quantiles out of order", put([*MEASURED, "summary", "min_us"], 99.0), "in order"),
    ("more samples than there are", put([*MEASURED, "summary", "samples"], 26), "samples"),
    ("no summary where timed", put([*MEASURED, "summary"], None), "summary"),
    ("times of a failure", put([*MEASURED, "status"], "wrong"), "summary"),
    ("a failure without a reason", put([*ENTRY, "measurements", 2, "reason"], ""), "reason"),
    ("5 bits", put(["problems", 0, "w13", "num_bits"], 5), "num_bits"),
    ("no experts", put(["problems", 0, "num_experts"], 0), "num_experts"),
    ("more slots than experts", put(["problems", 0, "top_k"], 9), "top_k"),
    ("an unknown activation", put(["problems", 0, "activation", "name"], "tanh"), "problems[0]"),
    ("a sixth of a field", drop("problems", 0, "act_dtype"), "act_dtype"),
    ("an unknown kind", put([*DEVICE, "kind"], "tpu"), "kind"),
    ("a capability of three", put([*DEVICE, "capability"], [9, 0, 0]), "capability"),
    ("flags that are text", put([*DEVICE, "flags"], "avx2"), "flags"),
    ("a version that is a number", put([*DEVICE, "versions", "torch"], 2), "versions.torch"),
    ("a driver that is a list", put([*DEVICE, "driver"], ["a"]), "driver"),
    ("an unknown fact of a device", put([*DEVICE, "colour"], "red"), "colour"),
    ("a date that is none", put(["sources", 0, "created"], "yesterday"), "created"),
    ("a hash that is none", put(["models", 0, "shapes_sha256"], "abc"), "shapes_sha256"),
    ("a commit that climbs", put(["sources", 0, "autosel", "commit"], "../x"), "commit"),
    ("a certificate that is text", put([*ENTRY, "certificates"], ["ok"]), "certificates"),
    ("a certificate of nothing", put([*ENTRY, "certificates"], [{}]), "certificates"),
    ("a plan of nothing", put([*ENTRY, "plan"], {}), "plan"),
    ("a plan that is a number", put([*ENTRY, "plan"], 3), "plan"),
    ("a deep certificate", put([*ENTRY, "certificates"], [{"a": [[[[[[[[[1]]]]]]]]]}]), "nesting"),
    ("an escape in a plan", put([*ENTRY, "plan"], {"why": ESC}), "printable"),
]  # fmt: skip


def refused(raw, word, tmp_path=None):
    """``raw`` is refused in one printable line that has ``word``."""
    with pytest.raises(PackError) as caught:
        content.from_bytes(raw, "p.json")
    message = str(caught.value)
    assert message.startswith("p.json"), message
    assert message.isprintable(), repr(message)
    assert len(message) < 1000
    assert word in message, message
    return message


def test_the_unchanged_pack_is_taken():
    assert content.from_bytes(resealed(data()), "p.json") == pack()


@pytest.mark.parametrize(("change", "word"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_a_forged_pack(change, word):
    values = data()
    change(values)
    refused(resealed(values), word)


def with_number(text):
    """A pack with ``text`` in the place of a number."""
    values = data()
    values["entries"][0]["measurements"][0]["first_call_ms"] = 123.456
    raw = resealed(values)
    assert raw.count(b": 123.456,") == 1
    return raw.replace(b": 123.456,", b": " + text + b",")


RAW = [
    ("empty", b"", "not valid JSON"),
    ("spaces", b"   ", "not valid JSON"),
    ("half", content.to_bytes(pack())[:-900], "not valid JSON"),
    ("two values", content.to_bytes(pack()) * 2, "not valid JSON"),
    ("a list", b"[]", "format"),
    ("a number", b"1", "format"),
    ("null", b"null", "format"),
    ("deep", b"[" * 100_000, "deep"),
    ("deep objects", b'{"a":' * 100_000, "deep"),
    ("a bomb of lists", b"[" + b"[]," * 600_000 + b"[]]", "objects and lists"),
    ("NaN", with_number(b"NaN"), "NaN"),
    ("Infinity", with_number(b"Infinity"), "Infinity"),
    ("minus Infinity", with_number(b"-Infinity"), "Infinity"),
    ("too large a float", with_number(b"1e999"), "finite"),
    ("thousands of digits", b'{"version":' + b"9" * 10_000 + b"}", "digits"),
    ("millions of digits", b'{"version":' + b"9" * 4_000_000 + b"}", "digits"),
    ("a version of many digits", b'{"format":"autosel-pack","version":9%s}' % (b"9" * 99), "newer"),
    ("a key twice", b'{"format":"autosel-pack","format":"autosel-pack"}', "twice"),
    ("latin-1", b'{"format":"\xe4"}', "UTF-8"),
    ("overlong UTF-8", b'{"format":"\xc0\xaf"}', "UTF-8"),
    ("UTF-16", '{"format":1}'.encode("utf-16"), "UTF-16"),
    ("a byte-order mark", b"\xef\xbb\xbf" + content.to_bytes(pack()), "byte-order mark"),
    ("a NUL", b"\x00", "not valid JSON"),
    ("a zip archive", b"PK\x03\x04rest", "zip"),
    ("a gzip file", b"\x1f\x8brest", "gzip"),
    ("a tar archive", b"../../x".ljust(257, b"\0") + b"ustar\x0000", "tar"),
    ("a pickle", pickle.dumps({"a": 1}), "pickle"),
    ("a database", b"SQLite format 3\x00", "SQLite"),
    ("an HTML page", b"<!DOCTYPE html>", "not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "word"), [r[1:] for r in RAW], ids=[r[0] for r in RAW])
def test_bytes_that_are_no_pack(raw, word):
    refused(raw, word)


def test_a_changed_letter_is_noticed():
    raw = content.to_bytes(pack())
    place = raw.index(b"faster than")
    refused(raw[:place] + b"slower" + raw[place + 6 :], "sha256 of the content")


def test_a_pack_without_a_hash_is_refused():
    values = data()
    del values["sha256"]
    refused(json.dumps(values).encode(), "sha256")


@pytest.mark.parametrize(
    "signature",
    [
        {}, [], "x", {"algorithm": "none", "key_id": "0" * 64, "value": ""},
        {"algorithm": "ed25519", "key_id": "0" * 64, "value": "A" * 86},
        {"algorithm": "ed25519", "key_id": "0" * 64, "value": "!" * 88},
        {"algorithm": "ed25519", "key_id": "../" * 21 + "x", "value": "A" * 86 + "=="},
        {"algorithm": "ed25519", "key_id": "0" * 64, "value": "A" * 86 + "==", "more": 1},
    ],
)  # fmt: skip
def test_a_signature_that_is_none(signature):
    refused(json.dumps({**data(), "signature": signature}).encode(), "signature")


def test_size_is_capped_before_parsing(tmp_path, monkeypatch):
    path = tmp_path / "huge.json"
    with open(path, "wb") as file:
        file.truncate(strict_json.MAX_BYTES + 1)  # sparse: takes no room
    monkeypatch.setattr(strict_json.json, "loads", lambda *a, **k: pytest.fail("parsed"))
    started = time.monotonic()
    with pytest.raises(PackError, match="bytes: found"):
        content.read(path)
    assert time.monotonic() - started < 60


def test_files_that_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "shadow").write_text("s3cret:x:0:0")
    (tmp_path / "secret").symlink_to(tmp_path / "shadow")
    for name, word in (
        ("pipe", "pipe"), ("loop", "cannot be read"), ("zero", "device"), (".", "folder"),
        ("missing", "cannot be read"), ("a\0b", "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(PackError, match=word):
            content.read(tmp_path / name)
    with pytest.raises(PackError) as caught:
        content.read(tmp_path / "secret")
    assert "s3cret" not in str(caught.value)  # nothing of the file is shown


def test_archives_with_climbing_members_write_nothing(tmp_path):
    """SEC-3: a pack is one JSON file; an archive is refused before anything is unpacked."""
    path = tmp_path / "pack.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../outside.json", "{}")
        archive.writestr("/absolute.json", "{}")
    with pytest.raises(PackError, match="zip archive"):
        content.read(path)
    assert [p.name for p in tmp_path.iterdir()] == ["pack.zip"]
    assert not (tmp_path.parent / "outside.json").exists()


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("bomb-went-off",))


def test_a_pickle_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "autosel-pack.json").write_bytes(pickle.dumps(Bomb(), protocol))
        with pytest.raises(PackError):
            content.read("autosel-pack.json")
    assert not (tmp_path / "bomb-went-off").exists()


def test_no_module_of_packs_evaluates_or_unpickles():
    from pathlib import Path

    import autosel.packs as package

    for path in Path(package.__file__).parent.glob("*.py"):
        text = path.read_text()
        for word in ("import pickle", "eval(", "exec(", "yaml", "__import__", "marshal"):
            assert word not in text, (path, word)


def paths(values, prefix=()):
    """Every place in the values of a pack."""
    yield prefix
    if isinstance(values, dict):
        for key in values:
            yield from paths(values[key], (*prefix, key))
    elif isinstance(values, list):
        for place in range(min(len(values), 3)):
            yield from paths(values[place], (*prefix, place))


WHOLE = data()
PLACES = [path for path in paths(WHOLE) if path]
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.just([]), st.just({}), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.sampled_from(["../x", "\x1b[2J", "a" * 5000, "__class__", "-1", "\u202e", "\x00"]),
)  # fmt: skip


@given(st.sampled_from(PLACES), JUNK)
def test_any_value_in_any_place_is_taken_or_refused_in_one_line(path, value):
    values = copy.deepcopy(WHOLE)
    put(list(path), lambda _: value)(values)
    raw = resealed(values)
    message = ""
    try:
        found = content.from_bytes(raw, "p.json")
    except PackError as error:
        message = str(error)
    if message:
        assert message.startswith("p.json")
        assert message.isprintable()
    else:  # what is taken is written and read back the same
        again = content.from_bytes(content.to_bytes(content.sealed(found)), "q.json")
        assert again.entries == found.entries


@given(st.binary(max_size=64), st.integers(0, 5000))
def test_any_bytes_anywhere(junk, place):
    raw = content.to_bytes(pack())
    place %= len(raw)
    changed = raw[:place] + junk + raw[place + len(junk) :]
    if changed == raw:
        return
    with pytest.raises(PackError):
        content.from_bytes(changed, "p.json")


@pytest.mark.parametrize("length", [1 << 16, 1 << 20])
def test_reading_stays_linear(length):
    """Long lists of short things cost no more than their bytes: no check is quadratic."""
    values = data()
    values["entries"][0]["measurements"] = values["entries"][0]["measurements"][:1] * (length >> 8)
    started = time.monotonic()
    content.from_bytes(resealed(values), "p.json")
    assert time.monotonic() - started < 60
