"""The audit: a single wrong weight is found and named, a correct kernel never accused."""

import pytest
import torch

from autosel.audit import audit
from autosel.compare import AUDIT_LIMIT, compare
from autosel.core import Activation, QuantScheme
from autosel.error_scale import judge
from autosel.packing import pack_last, unpack_last
from autosel.routing_synthetic import make_routing
from tests.verify.layers import Truthful, layer, pack, problem, tokens, with_tensors


def evidence(p, *, seed=0, count=96, fault=None, shift=0.0, kind="uniform"):
    """(suspect, verdict of the plain comparison) of the 16-bit emulation with a fault."""
    experts, x = layer(p, seed), tokens(count, p, seed)
    x = (x + shift).to(x.dtype)
    routing = make_routing(kind, count, p, seed=seed)
    judged = judge(x, experts, routing)
    packed = pack(experts)
    out = Truthful().output(fault(packed) if fault else packed, x, routing)
    scale = judged.scales["exact"]
    suspect = audit(x, experts, routing, out.double() - judged.reference, scale)
    verdict = compare(out, judged.reference, accuracy="exact", act_dtype=p.act_dtype, scale=scale)
    return suspect, verdict


def one_code(gemm, expert, output, column, steps):
    """Moves one code by ``steps``, into the range that codes have."""

    def plant(packed):
        scheme = getattr(packed.problem, gemm)
        words = packed.tensors[f"{gemm}.codes"].clone()
        count = words.shape[-1] * scheme.pack_factor
        codes = unpack_last(words[expert, output], scheme.num_bits, count).int()
        up = codes[column] + steps < 1 << scheme.num_bits
        codes[column] += steps if up else -steps
        words[expert, output] = pack_last(codes.to(torch.uint8), scheme.num_bits)
        return with_tensors(packed, **{f"{gemm}_codes": words})

    return plant


@pytest.mark.parametrize("gemm", ["w13", "w2"])
@pytest.mark.parametrize("act_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("steps", [2, 8])
def test_one_nibble(gemm, act_dtype, steps):
    p = problem(8, 2, 128, 64, act_dtype=act_dtype)
    suspect, _ = evidence(p, fault=one_code(gemm, 3, 17, 40, steps))
    assert suspect.guilty
    assert (suspect.gemm, suspect.expert, suspect.output, suspect.input) == (gemm, 3, 17, 40)


def test_one_nibble_that_the_comparison_cannot_see():
    p = problem(4, 2, 512, 256)
    suspect, verdict = evidence(p, fault=one_code("w13", 1, 300, 99, 2))
    assert verdict.status == "ok"
    assert verdict.score < 0.6
    assert suspect.guilty
    assert str(suspect) == "local expert 1 w13 output 300 input 99"


def test_one_zero_point_of_one_expert():
    p = problem(8, 2, 128, 64, QuantScheme(4, 64, False))

    def plant(packed):
        zeros = packed.tensors["w13.zero_points"].clone()
        zeros[5, 20, 1] += 1
        return with_tensors(packed, w13_zero_points=zeros)

    suspect, _ = evidence(p, fault=plant)
    assert suspect.guilty
    # A whole group is off, which moves more than one weight's evidence; the expert is sure.
    assert suspect.expert == 5


@pytest.mark.parametrize(("gemm", "output", "off"), [("w13", 9, 0.05), ("w2", 77, 0.02)])
def test_one_bias(gemm, output, off):
    p = problem(8, 2, 128, 64, has_bias=True)

    def plant(packed):
        bias = packed.tensors[f"{gemm}.bias"].clone()
        bias[2, output] += off
        return with_tensors(packed, **{f"{gemm}_bias": bias})

    suspect, verdict = evidence(p, count=256, fault=plant)
    assert verdict.status == "ok"
    assert suspect.guilty
    assert str(suspect) == f"local expert 2 {gemm} output {output} bias"


SCHEMES = [
    QuantScheme(4, 32, True),
    QuantScheme(4, -1, True),
    QuantScheme(4, 64, False, scale_dtype="float16"),
    QuantScheme(8, -1, False),
    QuantScheme(8, 32, True, has_g_idx=True),
]
ACTS = [Activation("silu"), Activation("relu2_no_mul"), Activation("swigluoai")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.key)
@pytest.mark.parametrize("act", ACTS, ids=lambda a: a.name)
@pytest.mark.parametrize("act_dtype", ["bfloat16", "float16"])
def test_a_correct_kernel_is_not_accused(scheme, act, act_dtype):
    p = problem(4, 2, 128, 64, scheme, activation=act, act_dtype=act_dtype, has_bias=True)
    worst = 0.0
    for seed in range(2):
        # Inputs off zero are the hard case: roundings of one row's weights add up.
        for shift in (0.0, 1.0):
            suspect, _ = evidence(p, seed=seed, count=64, shift=shift)
            worst = max(worst, suspect.score)
    print(f"{scheme.key:24} {act.name:13} {act_dtype}: highest score {worst:.1f} of {AUDIT_LIMIT}")
    assert 1 < worst < 3.5


def test_many_tokens_do_not_turn_rounding_into_evidence():
    p = problem(2, 1, 64, 32, QuantScheme(8, -1, False))
    for shift in (0.0, 1.0):
        suspect, _ = evidence(p, count=3000, shift=shift)
        assert suspect.score < 4


def test_router_weight_on_input_and_skewed_routing():
    p = problem(8, 1, 128, 64, router_weight_on_input=True)
    suspect, _ = evidence(p, fault=one_code("w2", 3, 17, 40, 4), count=200)
    assert suspect.guilty
    assert (suspect.gemm, suspect.expert, suspect.output, suspect.input) == ("w2", 3, 17, 40)
    clean, _ = evidence(p, count=200, kind="zipf:1.5")
    assert not clean.guilty


def test_nothing_served_accuses_nobody():
    p = problem(4, 2)
    experts, x, routing = layer(p), tokens(3, p), make_routing("uniform", 3, p)
    routing.topk_ids[:] = -1
    zero = torch.zeros(3, 128)
    assert audit(x, experts, routing, zero, zero) is None
