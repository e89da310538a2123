"""zentorch: the signed-nibble layout, its rules, its cache, and the package where installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from autosel import registry
from autosel.backends import zen_cpu
from autosel.core import Activation, Device, Problem, QuantScheme, Routing
from autosel.errors import UnsupportedError
from autosel.layouts.zen_s4 import ZenS4
from autosel.packing import pack_last
from autosel.sources import RandomSource

INSTALLED = importlib.util.find_spec("zentorch") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="package zentorch is not installed")

CPU = Device(kind="cpu", name="pretended", flags=zen_cpu._FLAGS)
SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(4, 4, 2, 128, 64, SCHEME, SCHEME)


def test_golden_words():
    """First words of the published test codes as two's-complement nibbles."""
    k, n = torch.arange(32), torch.arange(128)[:, None]
    codes = ((7 * k + 3 * n + k * n // 5) % 16).to(torch.uint8)  # [N, K]
    problem = replace(PROBLEM, num_experts=1, num_local_experts=1, top_k=1, hidden_size=32)
    experts = RandomSource(problem).load()
    words = pack_last(codes, 4)[None]
    packed = ZenS4().pack(replace(experts, w13=replace(experts.w13, codes=words)))
    row = [value & 0xFFFFFFFF for value in packed.tensors["w13"][0, 0].tolist()]
    assert row[:2] == [0x92B4D6F8, 0x1A3C5E70]


def test_nibbles_are_codes_minus_eight():
    experts = RandomSource(PROBLEM).load()
    words = ZenS4().pack(experts).tensors["w2"]
    for i in range(8):
        signed = (words << (28 - 4 * i)) >> 28  # arithmetic shift keeps the sign
        unsigned = (experts.w2.codes >> (4 * i)) & 0xF
        assert torch.equal(signed, unsigned - 8)


@pytest.mark.parametrize(("kept", "stored"), [("bfloat16", 2), ("float16", 4), ("float32", 4)])
def test_scales_are_never_rounded(kept, stored):
    scheme = replace(SCHEME, scale_dtype=kept)
    experts = RandomSource(replace(PROBLEM, w13=scheme, w2=scheme)).load()
    packed = ZenS4().pack(experts)
    assert packed.tensors["w13_scales"].itemsize == stored
    assert torch.equal(ZenS4().unpack(packed).w13.scales, experts.w13.scales)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"w13": QuantScheme(8, 32, True)}, "w13 bits: found 8"),
        ({"w2": QuantScheme(4, 32, False)}, "w2 zero points: found present"),
        ({"w13": QuantScheme(4, 32, True, True)}, "w13 act-order"),
        ({"w2": QuantScheme(4, 6, True)}, "w2 inputs of a group: found 6"),
        ({"activation": Activation("silu", limit=7.0)}, "activation constants"),
        ({"activation": Activation("swigluoai", limit=5.0)}, "activation constants"),
        ({"activation": Activation("situ", beta=1.0)}, "activation: found situ"),
        ({"activation": Activation("silu_no_mul")}, "activation: found silu_no_mul"),
        ({"top_k": 1, "router_weight_on_input": True}, "router weight: found on input"),
        ({"act_dtype": "float16"}, "activations' dtype: found float16, required bfloat16"),
        ({"intermediate_size": 80}, "w2 inputs: found 80, required a multiple of 32"),
    ],
)
def test_refusals(change, what):
    assert what in str(registry.get("zen_cpu").supports(replace(PROBLEM, **change), CPU))


@pytest.mark.parametrize("version", [None, "2.12.0", "3.13.0"])
def test_the_release_must_match_torch(monkeypatch, version):
    monkeypatch.setattr(zen_cpu, "_version", lambda: version)
    text = str(registry.get("zen_cpu").available(CPU))
    assert f"found {version or 'not installed'}" in text
    assert "pip install 'zentorch==" in text


def test_a_matching_release_and_processor_is_supported(monkeypatch):
    monkeypatch.setattr(zen_cpu, "_version", lambda: f"{zen_cpu._minor(torch.__version__)}.0.7")
    assert registry.get("zen_cpu").supports(PROBLEM, CPU)
    poor = replace(CPU, flags=("avx2",))
    assert "no avx512f" in str(registry.get("zen_cpu").supports(PROBLEM, poor))


class FakeOperators:
    """Remembers the weights it saw by address, as the package does, until told to forget."""

    def __init__(self):
        self.kept = {}
        self.clears = 0

    def zentorch_clear_weight_cache(self):
        self.kept.clear()
        self.clears += 1

    def zentorch_fused_moe(self, out, x, w13, w2, b13, b2, weights, ids, skip, act, s13, s2):
        assert (ids >= 0).all()
        key = w13.data_ptr(), w2.data_ptr()
        out += self.kept.setdefault(key, w13.sum().item() % 1000)


def test_the_packages_cache_never_outlives_the_weights(monkeypatch):
    """New weights in the same memory, and memory that was freed and given out again."""
    operators = FakeOperators()
    monkeypatch.setattr(zen_cpu, "_operators", lambda: operators)
    backend = zen_cpu.ZenCpu()
    packed = ZenS4().pack(RandomSource(PROBLEM).load())
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    routing = Routing(torch.tensor([[0, 1]], dtype=torch.int32), torch.ones(1, 2))

    def value():
        out = torch.full_like(x, float("nan"))
        return backend.run(packed, x, routing, {}, out)[0, 0].item()

    def truth():
        return torch.tensor(packed.tensors["w13"].sum().item() % 1000).bfloat16().item()

    assert value() == truth()
    assert value() == truth()
    assert operators.clears == 1, "unchanged weights keep their cached copies"
    packed.tensors["w13"].add_(1)
    assert value() == truth()
    assert operators.clears == 2
    packed = SimpleNamespace(  # the same memory behind new tensor objects
        problem=packed.problem, tensors={k: t.view_as(t) for k, t in packed.tensors.items()}
    )
    value()
    assert operators.clears == 3


def test_a_package_that_cannot_start_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "zentorch.py").write_text("raise RuntimeError('needs\\nanother torch')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "zentorch", raising=False)
    with pytest.raises(UnsupportedError, match="zentorch: import: found needs another torch"):
        zen_cpu._operators()
    sys.modules.pop("zentorch", None)


@needs_package
@pytest.mark.integration
def test_words_and_numbers_against_the_package():
    """``zentorch_woq_repack_weight`` gives our words, and the operator verifies on them."""
    script = textwrap.dedent(
        """
        import torch, zentorch
        from autosel import registry
        from autosel.canonical import expert_codes
        from autosel.core import Activation, Problem, QuantScheme
        from autosel.device import detect
        from autosel.layouts.zen_s4 import ZenS4
        from autosel.sources import RandomSource
        from autosel.verify import make_cases, verify_candidate
        backend = registry.get("zen_cpu")
        for name in ("silu", "swigluoai"):
            scheme = QuantScheme(4, 64, True)
            problem = Problem(4, 4, 2, 192, 128, scheme, scheme, Activation(name))
            support = backend.supports(problem, detect("cpu"))
            if not support:
                print("refused", support)
                break
            experts = RandomSource(problem).load()
            packed = ZenS4().pack(experts)
            for e in range(4):
                signed = (expert_codes(experts.w2, e).int() - 8).to(torch.int8)
                words = torch.ops.zentorch.zentorch_woq_repack_weight(signed)
                assert torch.equal(words, packed.tensors["w2"][e])
            packed = backend.layout(problem, {}).pack(experts)
            verdict = verify_candidate(backend, packed, {}, make_cases(experts))
            print("ok" if verdict else verdict.reason)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[")]
    if lines[0].startswith("refused"):
        pytest.skip(lines[0])
    assert lines == ["ok", "ok"]
