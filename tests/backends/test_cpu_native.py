"""The C++ kernel on every instruction set this machine can run, and under the sanitizers."""

import dataclasses
import functools
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from autosel import native, reference
from autosel.backends.cpu_native import _A8, _DOTS, CpuNativeBackend
from autosel.core import (
    ACTIVATIONS,
    Activation,
    CanonicalExperts,
    Problem,
    QuantScheme,
    QuantWeight,
    Routing,
)
from autosel.device import detect
from autosel.dispatch import apply
from autosel.errors import UnsupportedError
from autosel.packing import pack_last

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler on PATH")

X86 = platform.machine() in ("x86_64", "AMD64")
CPU_FLAGS = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
#: What each build needs from the processor. The narrower ones are built quickly: it is their
#: branches of the source that are tested, not their speed.
BUILDS = {
    (native.host_arch(),): "",
    ("-march=x86-64-v3", "-O1"): "avx2",
    ("-march=x86-64", "-O1"): "sse2",
    # Intel's tile instructions in plain C++; the real ones run in the first build where they exist.
    (native.host_arch(), "-O1", "-DWNA16_EMULATE_AMX"): "avx512_bf16",
}
TOLERANCE = {"bfloat16": 5e-3, "float16": 1e-3, "float32": 2e-6}
#: 8-bit activations: 127 steps for the largest value of a group, twice, and the activation between.
A8_TOLERANCE = 4e-2


def dots(act_dtype):
    """The products that the loaded build and this processor can do."""
    can = [name for name, (number, _) in _DOTS.items() if native.load().wna16_can(number)]
    return [name for name in can if act_dtype == "bfloat16" or name not in ("bf16", "amx")]


def tolerance(act_dtype, dot):
    return A8_TOLERANCE if dot in _A8 else TOLERANCE[act_dtype]


def random_weight(generator, experts, outputs, inputs, scheme, bias):
    codes = torch.randint(
        0, 1 << scheme.num_bits, (experts, outputs, inputs), generator=generator, dtype=torch.uint8
    )
    groups = scheme.num_groups(inputs)
    spread = torch.rand(experts, outputs, groups, generator=generator) * 0.9 + 0.1
    scales = spread * 4 / (1 << scheme.num_bits) / inputs**0.5
    zeros = g_idx = None
    if not scheme.symmetric:
        zeros = torch.randint(
            0, 1 << scheme.num_bits, scales.shape, generator=generator, dtype=torch.uint8
        )
    if scheme.has_g_idx:
        size = inputs if scheme.group_size == -1 else scheme.group_size
        ordered = torch.arange(inputs) // size
        shuffles = [torch.randperm(inputs, generator=generator) for _ in range(experts)]
        g_idx = torch.stack([ordered[s] for s in shuffles]).to(torch.int32)
    return QuantWeight(
        scheme,
        inputs,
        pack_last(codes, scheme.num_bits),
        scales.to(getattr(torch, scheme.scale_dtype)),
        zeros,
        g_idx,
        torch.randn(experts, outputs, generator=generator) if bias else None,
    )


def random_layer(w13, w2=None, *, act=None, act_dtype="bfloat16", bias=False, sizes=(5, 72, 40)):
    generator = torch.Generator().manual_seed(7)
    experts, hidden, inter = sizes
    act, w2 = act or Activation(), w2 or w13
    problem = Problem(experts, experts, 2, hidden, inter, w13, w2, act, act_dtype, bias)
    return CanonicalExperts(
        problem,
        random_weight(generator, *problem.w13_shape, w13, bias),
        random_weight(generator, *problem.w2_shape, w2, bias),
    )


def random_call(problem, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, problem.hidden_size, generator=generator)
    scores = torch.rand(num_tokens, problem.num_experts, generator=generator)
    weights, ids = scores.topk(problem.top_k)
    if num_tokens > 2:
        ids[1, 0] = -1
    return x.to(getattr(torch, problem.act_dtype)), Routing(ids.to(torch.int32), weights)


def error(experts, num_tokens, params):
    backend = CpuNativeBackend()
    packed = backend.layout(experts.problem, params).pack(experts)
    x, routing = random_call(experts.problem, num_tokens)
    out = apply(backend, packed, x, routing, params, out=torch.full_like(x, float("nan")))
    truth = reference.moe(x, experts, routing)
    return float((out.double() - truth).norm() / truth.norm())


@pytest.fixture(autouse=True)
def two_threads():
    """The kernel's own parallel loops are part of what is tested."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BUILDS, ids=lambda flags: flags[0])
def build(request, monkeypatch):
    """Runs the test on one build of the kernel."""
    needs = BUILDS[request.param]
    if needs and (not X86 or needs not in CPU_FLAGS):
        pytest.skip(f"this processor has no {needs}")
    monkeypatch.setattr(native, "load", functools.partial(native.build, request.param))
    return request.param


@pytest.mark.parametrize("act_dtype", TOLERANCE)
@pytest.mark.parametrize("num_bits", [4, 8])
def test_schemes_match_the_reference(build, num_bits, act_dtype):
    for group, symmetric, act_order in itertools.product((8, -1), (True, False), (True, False)):
        scheme = QuantScheme(num_bits, group, symmetric, act_order, "float16")
        experts = random_layer(scheme, act_dtype=act_dtype)
        for dot, num_tokens in itertools.product(dots(act_dtype), (1, 15)):
            found = error(experts, num_tokens, {"dot": dot})
            assert found < tolerance(act_dtype, dot), (scheme, dot, num_tokens)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("group", [64, 128, -1])
def test_tiles_match_the_reference(build, num_bits, group):
    """Sizes and groups that tiles take whole; 200 rows an expert are two blocks and odd ends."""
    tiles = [dot for dot in dots("bfloat16") if dot.startswith("amx")]
    if not tiles:
        pytest.skip("this build or processor has no tile unit")
    for symmetric, act_order in itertools.product((True, False), (True, False)):
        scheme = QuantScheme(num_bits, group, symmetric, act_order, "float16")
        experts = random_layer(scheme, bias=act_order, sizes=(3, 256, 128))
        for dot, num_tokens in itertools.product(tiles, (1, 7, 40, 300)):
            found = error(experts, num_tokens, {"dot": dot})
            assert found < tolerance("bfloat16", dot), (scheme, dot, num_tokens)


def test_tiles_read_no_value_of_another_row(build):
    """Rows beyond an expert's last are read into tiles; a NaN there must not reach a product."""
    experts = random_layer(QuantScheme(4, 64, True), sizes=(3, 256, 128))
    backend = CpuNativeBackend()
    for dot in dots("bfloat16"):
        packed = backend.layout(experts.problem, {"dot": dot}).pack(experts)
        x, routing = random_call(experts.problem, 50)
        clean = apply(backend, packed, x, routing, {"dot": dot})
        x[17] = torch.nan
        dirty = apply(backend, packed, x, routing, {"dot": dot})
        assert dirty[17].isnan().all(), dot
        others = torch.arange(50) != 17
        assert torch.equal(dirty[others], clean[others]), dot


def test_a_product_the_processor_lacks_is_refused(monkeypatch):
    narrow = functools.partial(native.build, ("-march=x86-64", "-O1"))
    if not X86:
        pytest.skip("the narrow build is for x86-64")
    monkeypatch.setattr(native, "load", narrow)
    experts = random_layer(QuantScheme(4, 8, True))
    for dot in ("bf16", "amx", "int8", "amx_int8"):
        with pytest.raises(UnsupportedError, match=f"found {dot}"):
            error(experts, 3, {"dot": dot})


def test_eight_bit_activations_are_a_class_of_their_own():
    backend = CpuNativeBackend()
    found = {dot: backend.accuracy({"dot": dot}) for dot in _DOTS}
    assert found == {
        "fp32": "exact",
        "bf16": "exact",
        "amx": "exact",
        "int8": "a8",
        "amx_int8": "a8",
    }


@pytest.mark.parametrize("flags", [(), ("avx512_bf16",), ("avx512_bf16", "amx_bf16", "amx_int8")])
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_space_offers_what_the_processor_has(flags, num_tokens):
    scheme = QuantScheme(4, 8, True)
    problem = random_layer(scheme).problem
    device = dataclasses.replace(detect("cpu"), flags=flags)
    space = CpuNativeBackend().space(problem, num_tokens, device)
    names = set(space.choices.get("dot", (space.default["dot"],)))
    assert ("amx" in names) == ("amx_bf16" in flags)
    assert ("bf16" in names) == ("avx512_bf16" in flags)
    assert space.default["dot"] in names
    assert CpuNativeBackend().accuracy(space.default) == "exact"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_match_the_reference(build, name):
    constants = {
        "swigluoai_uninterleave": {"limit": 2.0, "alpha": 1.3, "beta": 0.5},
        "situ": {"beta": 1.5, "linear_beta": 2.0},
        "silu": {"limit": 0.5},
    }
    act = Activation(name, **constants.get(name, {}))
    experts = random_layer(
        QuantScheme(4, 8, True, scale_dtype="float32"), act=act, act_dtype="float32", bias=True
    )
    assert error(experts, 9, {"dot": "fp32"}) < TOLERANCE["float32"]


def test_mixed_bits_and_odd_sizes(build):
    experts = random_layer(
        QuantScheme(4, 32, True), QuantScheme(8, -1, False), bias=True, sizes=(3, 160, 100)
    )
    for dot, num_tokens in itertools.product(dots("bfloat16"), (1, 2, 3, 4, 5, 6, 13)):
        assert error(experts, num_tokens, {"dot": dot}) < tolerance("bfloat16", dot)


def test_act_order_cut_by_a_rank_is_refused():
    scheme = QuantScheme(4, 32, True, has_g_idx=True)
    experts = random_layer(scheme, sizes=(2, 64, 64))
    experts.w2.g_idx[1, :] = 0
    with pytest.raises(UnsupportedError, match=r"w2\.g_idx"):
        CpuNativeBackend().layout(experts.problem, {}).pack(experts)


def test_every_source_names_the_library():
    """A source left out of the list could change and an old library be taken for the new one."""
    folder = Path(native.__file__).parent / "kernels" / "csrc"
    assert sorted(native.SOURCES) == sorted(path.name for path in folder.iterdir())


def test_no_compiler_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native.build.cache_clear()
    with pytest.raises(UnsupportedError, match="compiler"):
        native.load()


def test_build_survives_a_cache_folder_that_cannot_be_written(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("AUTOSEL_CACHE", str(blocked))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # Where it is built is asked here, not how well: everything, optimised, takes 14 s.
    monkeypatch.setattr(native, "_FLAGS", (*native._FLAGS, "-O0"))
    if X86:
        monkeypatch.setattr(native, "host_arch", lambda: "-march=x86-64")
    native.build.cache_clear()
    for _ in range(2):  # each process would leave 400 KB, were it not kept for the next
        assert native.load().wna16_workspace_bytes
        native.build.cache_clear()
    (folder,) = temporary.iterdir()
    assert len([*folder.iterdir()]) == 1


def test_nowhere_to_build_is_a_reason(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("AUTOSEL_CACHE", str(blocked))
    monkeypatch.setattr(tempfile, "tempdir", str(blocked))
    native.build.cache_clear()
    with pytest.raises(UnsupportedError, match="Not a directory"):
        native.load()


SANITIZED = """
import torch
from autosel import native
native.load = lambda: native.build((native.host_arch(), "-O0", "-fsanitize=address,undefined",
                                    "-fno-sanitize-recover=undefined", "-DWNA16_EMULATE_AMX"))
from tests.backends.test_cpu_native import *
for num_bits in (4, 8):
    for act_dtype in TOLERANCE:
        for group, sizes in ((8, (3, 72, 41 + 7)), (64, (3, 128, 192))):
            scheme = QuantScheme(num_bits, group, False, True)
            experts = random_layer(scheme, act_dtype=act_dtype, bias=True, sizes=sizes)
            for dot in dots(act_dtype):
                for tokens in (1, 3, 29):
                    assert error(experts, tokens, {"dot": dot}) < tolerance(act_dtype, dot)
print("clean")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # -O0: instrumented code of every path takes 11 s to compile, not 35
def test_sanitizers_find_nothing():
    asan = subprocess.run(
        [native.compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not os.path.isabs(asan):
        pytest.skip("the compiler has no address sanitizer")
    environment = {
        **os.environ,
        "LD_PRELOAD": asan,
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED],
        capture_output=True, text=True, env=environment,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("clean")


def test_source_compiles_for_arm(tmp_path):
    """The portable branch is what an Arm machine gets; a cross compiler shows that it is C++."""
    cross = shutil.which("aarch64-linux-gnu-g++")
    if cross is None:
        pytest.skip("no aarch64-linux-gnu-g++ on PATH")
    done = subprocess.run(
        native.command(cross, ("-march=armv8-a", "-O0"), tmp_path / "arm.so"),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
