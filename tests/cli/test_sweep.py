"""``sweep`` with real weights and scripted backends."""

import pytest

from autosel import registry
from autosel.backends.emulation import Emulation
from autosel.core import Reason, Support
from autosel.interfaces import Space
from autosel.store import Store
from tests.fakes import judge_one_case, prove_quickly
from tests.threads import one_thread


class Plain(Emulation):
    """The emulation under another name, without settings to tune."""

    name = "plain_fake"
    summary = "Right."

    def space(self, problem, num_tokens, device):
        return Space({"weight_dtype": "float32", "matmul": "linear"})


class Wrong(Plain):
    name = "wrong_fake"
    summary = "Twice what is right."

    def run(self, packed, x, routing, params, out):
        return super().run(packed, x, routing, params, out).mul_(2)


class Raising(Plain):
    name = "raising_fake"
    summary = "Raises."

    def run(self, packed, x, routing, params, out):
        raise RuntimeError("kernel\nfault \x1b[31m")


class Refusing(Plain):
    name = "refusing_fake"
    summary = "Supports nothing."

    def supports(self, problem, device):
        return Support.no(Reason("moon", "half", "full"))


class Quick(Plain):
    name = "quick_fake"
    summary = "8-bit activations inside."

    def accuracy(self, params):
        return "a8"


@pytest.fixture
def fakes():
    made = [Plain(), Wrong(), Raising(), Refusing(), Quick()]
    for backend in made:
        registry.register(backend)
    yield ",".join(backend.name for backend in made)
    for backend in made:
        registry.unregister(backend.name)


@pytest.fixture
def example(get_checkpoint):
    return get_checkpoint("ct-w4-g128-sym-mixtral").path


@pytest.fixture(autouse=True)
def _one_thread():
    """Threads of one small matmul wait for each other; on a busy machine that is all they do."""
    with one_thread():
        yield


#: In this process: starting another one takes seconds, and the tests of it have their own file.
FAST = ("--limit", "0.05", "--no-isolate")


@pytest.fixture
def light(monkeypatch):
    """One verification case instead of all, and rates that nobody measured: what these tests ask
    about is the command, and the first test runs everything.
    """
    from autosel import tune
    from autosel.roofline import Ceilings

    judge_one_case(monkeypatch)
    prove_quickly(monkeypatch)
    monkeypatch.setattr(tune, "ceilings", lambda *a, **k: Ceilings(10.0, 1.0))


def test_a_sweep_ends_with_a_decision_and_a_reason_for_everybody(autosel, fakes, example, tmp_path):
    ran = autosel("sweep", example, "--tokens", "4,1", "--backends", fakes, "--limit", "0.05")
    assert ran.status == 0, ran.err
    left_out, _, table = ran.out.partition("chosen")
    assert "left out" in left_out
    assert "plain_fake" in table
    assert "1-2" in table
    assert "3+" in table
    assert "is the only candidate that may be chosen" in ran.out
    for words in ("wrong_fake", "kernel fault \\x1b[31m", "moon: found half, required full"):
        assert words in ran.out, words
    assert "\x1b" not in ran.out + ran.err
    assert str(tmp_path / "autosel.db") in ran.err
    with Store.open(tmp_path / "autosel.db") as store:
        assert {d.winner.backend for d in store.decisions()} == {"plain_fake"}
        assert len(store.measurements()) == 10


def test_json_is_strict_and_complete(autosel, light, fakes, example):
    ran = autosel("sweep", example, "--tokens", "2", "--backends", fakes, *FAST, "--json")
    assert ran.status == 0, ran.err
    (answer,) = ran.json["answers"]
    (decision,) = answer["decisions"]
    assert decision["winner"]["backend"] == "plain_fake"
    by_name = {m["candidate"]["backend"]: m for m in answer["measurements"]}
    assert by_name["wrong_fake"]["status"] == "wrong"
    assert by_name["raising_fake"]["status"] == "failed"
    assert by_name["refusing_fake"]["status"] == "unsupported"
    for name in ("wrong_fake", "raising_fake", "refusing_fake"):
        assert by_name[name]["time_us"] is None
        assert by_name[name]["reason"]
    assert by_name["plain_fake"]["time_us"] > 0
    assert answer["ceilings"]["read_gbps"] > 0
    assert ran.json["interrupted"] is False


def test_eight_bit_activations_win_only_when_allowed(autosel, light, fakes, example):
    args = ["sweep", example, "--tokens", "1", "--backends", "quick_fake", *FAST]
    ran = autosel(*args)
    assert ran.status == 1
    assert "nothing usable" in ran.error
    assert "not allowed" in ran.out
    ran = autosel(*args, "--allow-a8")
    assert ran.status == 0
    assert "quick_fake" in ran.out


def test_nothing_usable_is_one_line_and_status_1(autosel, light, fakes, example):
    ran = autosel(
        "sweep", example, "--tokens", "1", "--backends", "wrong_fake,refusing_fake", *FAST
    )
    assert ran.status == 1
    assert "nothing usable" in ran.error
    assert "moon" in ran.out
    ran = autosel("sweep", example, "--tokens", "1", "--backends", "refusing_fake", *FAST, "--json")
    assert ran.status == 1
    assert ran.json["answers"][0]["decisions"] == []
    assert ran.json["answers"][0]["nothing_usable"][0]["why"]


def test_ctrl_c_keeps_what_is_measured_and_the_same_command_goes_on(
    autosel, fakes, example, tmp_path
):
    class Stopping(Plain):
        name = "stopping_fake"
        summary = "Interrupts at 4 tokens."
        armed = True
        asked = 0

        def space(self, problem, num_tokens, device):
            # The first question comes while 1 token is tried, to compile ahead.
            self.asked += num_tokens == 4
            if self.armed and self.asked == 2:
                raise KeyboardInterrupt
            return super().space(problem, num_tokens, device)

    stopping = Stopping()
    args = ["sweep", example, "--tokens", "1,4", "--backends", "plain_fake,stopping_fake", *FAST]
    with registry.register(stopping):
        ran = autosel(*args, "--fresh")
        assert ran.status == 130
        assert "interrupted" in ran.err
        assert "--fresh" not in ran.err  # it would not go on from here
        assert f"autosel sweep {example} --tokens 1,4" in ran.err
        with Store.open(tmp_path / "autosel.db") as store:
            kept = store.measurements()
        assert {m.num_tokens for m in kept} == {1}
        assert len(kept) == 2
        stopping.armed = False
        ran = autosel(*args)
        assert ran.status == 0
        assert "2 measured, 2 taken from the database" in ran.err
        with Store.open(tmp_path / "autosel.db") as store:
            # What was there before was not measured again.
            assert [m for m in store.measurements() if m.num_tokens == 1] == kept
            assert len(store.measurements(history=True)) == 4
        ran = autosel(*args)
        assert "0 measured, 4 taken from the database" in ran.err
        ran = autosel(*args, "--fresh")
        assert "4 measured, 0 taken from the database" in ran.err


def test_a_sweep_of_one_backend_says_who_else_is_in_the_running(autosel, light, fakes, example):
    args = ["sweep", example, "--tokens", "2", *FAST]
    autosel(*args, "--backends", "plain_fake,wrong_fake")
    ran = autosel(*args, "--backends", "quick_fake", "--allow-a8")
    assert ran.status == 0, ran.err
    assert "not tried now, in the running as stored: 1 (plain_fake)" in ran.out
    ran = autosel(*args, "--backends", "quick_fake", "--json")  # may not win: the other one does
    (answer,) = ran.json["answers"]
    assert list(answer["standing"]) == ["2"]
    assert answer["standing"]["2"][0].startswith("plain_fake[")
    assert answer["decisions"][0]["winner"]["backend"] == "plain_fake"


def test_sweep_explain_and_plot_agree_on_the_key(autosel, light, fakes, checkpoint, tmp_path):
    """Swept by the command line, found by it: for every format, width and kind of layer."""
    layer = checkpoint.moe_layers[-1]
    ran = autosel("sweep", checkpoint.path, "--layer", layer, "--tokens", "2", "--backends",
                  "plain_fake", *FAST)  # fmt: skip
    assert ran.status == 0, ran.err
    found = autosel("explain", checkpoint.path, "--layer", layer, "--tokens", 7, "--json").json
    assert [answer["status"] for answer in found["answers"]] == ["tuned"]
    assert found["answers"][0]["used"]["backend"] == "plain_fake"
    out = tmp_path / "x.svg"
    assert autosel("plot", checkpoint.path, "--layer", layer, "-o", out).status == 0
    assert "plain_fake" in out.read_text()


def test_a_split_preset_is_found_again_by_the_library(autosel, light, fakes, tmp_path):
    import autosel as package

    options = ["--tp", 2, "--experts", 2, "--bits", 8, "--group-size", 64, "--asym"]
    ran = autosel("sweep", "granite-3-1b-a400m", *options, "--tokens", 1, "--backends",
                  "plain_fake", *FAST)  # fmt: skip
    assert ran.status == 0, ran.err
    found = package.explain(
        "granite-3-1b-a400m", tokens=1, db=tmp_path / "autosel.db",
        tp=2, experts=2, num_bits=8, group_size=64, symmetric=False,
    )  # fmt: skip
    assert found.status == "tuned"


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--backends", "emulatoin"], 1, "did you mean emulation"),
        (["--tokens", "0"], 2, "whole number"),
        (["--tokens", "1,,"], 1, "found"),
        (["--tokens", ","], 2, "no token count"),
        (["--tokens", "99999999999999999999"], 2, "whole number"),
        (["--routing", "unifrom"], 1, "unifrom"),
        (["--layer", "7"], 1, "found 7, expected one of 0"),
        (["--layer", "-1"], 2, "--layer"),
        (["--bits", "4"], 2, "only for presets"),
        (["--tp", "3"], 1, "3"),
        (["--limit", "0"], 2, "--limit"),
        (["--device", "tpu"], 2, "tpu"),
    ],
)
def test_bad_options(autosel, example, tmp_path, args, status, words):
    if args == ["--tokens", "1,,"]:
        args, words = ["--tokens", "1,,", "--backends", "nowhere"], "nowhere"
    ran = autosel("sweep", example, *args)
    assert ran.status == status
    assert words in ran.error
    assert not (tmp_path / "autosel.db").exists()


def test_folders_and_presets_spelled_wrong(autosel):
    assert "mixtral-8x7b" in autosel("sweep", "mixtral8x7b").error
    assert "expected a folder" in autosel("sweep", "./nowhere").error
    assert "autosel presets" in autosel("sweep", "qqqqqq").error
    assert autosel("sweep", "").status == 1


def test_what_failed_is_listed_in_quarantine_and_retried_when_asked(autosel, light, fakes, example):
    args = ("sweep", example, "--tokens", "2", "--backends", "raising_fake,plain_fake", *FAST)
    assert autosel("backends", "--json").json["quarantine"] == []
    assert autosel(*args).status == 0
    (held,) = autosel("backends", "--json").json["quarantine"]
    assert held["candidate"]["backend"] == "raising_fake"
    assert (held["status"], held["tokens"], held["times"]) == ("failed", "2", 1)
    ran = autosel("backends", example)
    assert "in quarantine here" in ran.out
    assert "kernel fault \\x1b[31m" in ran.out
    assert "\x1b" not in ran.out
    # Another layer's command does not show it, and a second sweep does not run it again.
    assert "in quarantine" not in autosel("backends", "mixtral-8x7b").out
    ran = autosel(*args, "--fresh", "--json")
    (row,) = [m for m in ran.json["answers"][0]["measurements"] if m["status"] == "failed"]
    assert "not tried again (--retry-failed does): failed once" in row["reason"]
    assert autosel(*args, "--retry-failed").status == 0
    (held,) = autosel("backends", "--json").json["quarantine"]
    assert held["times"] == 2
