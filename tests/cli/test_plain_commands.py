"""``devices``, ``backends`` and ``presets``: on this machine and on pretended ones."""

import pytest

from autosel import presets, registry
from autosel.core import Device, Support
from autosel.device import pretend
from autosel.interfaces import Backend

H200 = Device("cuda", "NVIDIA H200", capability=(9, 0), multiprocessors=132, driver="570.1",
              versions=(("torch", "2.13.0"),))  # fmt: skip


def test_devices(autosel):
    ran = autosel("devices", "--json")
    assert ran.status == 0
    first = ran.json["devices"][-1]
    assert first["kind"] == "cpu"
    assert first["name"]
    assert first["threads"] >= 1
    assert Device.from_dict({k: first[k] for k in first if k not in ("fingerprint", "default")})
    text = autosel("devices")
    assert first["name"] in text.out
    assert first["fingerprint"] in text.out


def test_a_pretended_device_is_shown(autosel):
    with pretend(H200):
        ran = autosel("devices")
    assert "NVIDIA H200" in ran.out
    assert "9.0" in ran.out
    assert "570.1" in ran.out


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_with_every_accelerator_hidden_the_cpu_remains(autosel, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    for args in (["devices"], ["backends"], ["presets"]):
        assert autosel(*args).status == 0


def test_asking_for_a_device_that_is_not_there_is_one_line(autosel):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    ran = autosel("backends", "--device", "cuda")
    assert ran.status == 1
    assert "cuda" in ran.error


def test_every_backend_says_yes_or_every_reason_why_not(autosel):
    ran = autosel("backends", "--json")
    (answer,) = ran.json["answers"]
    found = {item["name"]: item for item in answer["backends"]}
    assert set(found) == set(registry.names())
    for item in found.values():
        assert item["supported"] != bool(item["reasons"])
        for reason in item["reasons"]:
            assert all(reason[key] for key in ("what", "found", "required"))
    assert found["emulation"]["supported"]
    text = autosel("backends").out
    for name in found:
        assert f"\n{name} " in text


def test_backends_of_a_layer(autosel):
    ran = autosel("backends", "mixtral-8x7b", "--bits", 8, "--group-size", "channel", "--json")
    (answer,) = ran.json["answers"]
    assert answer["problem"]["w13"]["num_bits"] == 8
    assert answer["problem"]["w13"]["group_size"] == -1
    reasons = {item["name"]: item["reasons"] for item in answer["backends"]}
    assert any("bits" in reason["what"] for reason in reasons["torch_int4"])
    assert not reasons["emulation"]


def test_backends_of_a_checkpoint(autosel, get_checkpoint):
    ran = autosel("backends", get_checkpoint("ct-w4-g128-sym-mixtral").path)
    assert ran.status == 0
    assert "3 experts" in ran.out


class Broken(Backend):
    name = "broken_when_asked"
    summary = "Raises when asked."

    def available(self, device):
        raise RuntimeError("plug-in fault")

    def supports(self, problem, device):
        return Support.yes()

    def layout(self, problem, params):
        raise NotImplementedError

    def run(self, packed, x, routing, params, out):
        raise NotImplementedError


def test_a_plug_in_that_raises_is_a_row(autosel):
    with registry.register(Broken):
        ran = autosel("backends")
    assert ran.status == 0
    assert "plug-in fault" in ran.out
    assert "emulation" in ran.out


def test_presets(autosel):

    ran = autosel("presets", "--json")
    assert [item["name"] for item in ran.json["presets"]] == list(presets.names())
    assert "mixtral-8x7b" in autosel("presets").out


def test_flags_of_a_sweep_that_was_stopped_before_it_decided(autosel, tmp_path):
    """``explain`` and ``pack`` decide from what was measured; so does this."""
    from autosel.core import Candidate, Measurement
    from autosel.device import detect
    from autosel.store import Store

    problem, device = presets.get("granite-3-1b-a400m", experts=4), detect("cpu")
    rows = [
        Measurement(
            problem, 4, "uniform", Candidate.of(name, {}, ""), device, "ok", "exact", "",
            tuple(us + n for n in range(20)), timing=(("cache", "cold"),), weight_bytes=1,
        )
        for name, us in (("cpu_native", 10.0), ("emulation", 90.0))
    ]  # fmt: skip
    with Store.open(tmp_path / "autosel.db") as store:
        store.add_measurements(rows)
    ran = autosel("flags", "granite-3-1b-a400m", "--experts", "4", "--device", "cpu", "--json")
    assert ran.status == 0, ran.err
    assert {engine["backend"] for engine in ran.json["engines"]} == {"cpu_native"}


def test_flags_count_no_8_bit_winner_that_was_not_asked_for(autosel, tmp_path):
    from dataclasses import replace

    from autosel.device import detect
    from autosel.store import Store
    from tests.made_evidence import COLD, decided, row

    device = detect("cpu")
    problem = presets.get("granite-3-1b-a400m", experts=4)
    won = replace(row("zen_cpu", 4, 50.0, device=device, problem=problem), accuracy="a8")
    with Store.open(tmp_path / "autosel.db") as store:
        store.add_measurements([won])
        store.add_decision(decided(won, 1, None), device, COLD)
    words = ("flags", "granite-3-1b-a400m", "--experts", "4", "--device", "cpu")
    assert "found none" in autosel(*words).error
    assert autosel(*words, "--allow-a8").status == 0
