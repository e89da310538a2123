"""The judgement itself: limits, non-finite values, shapes."""

import math

import pytest
import torch

from autosel.compare import LIMITS, compare, nominal_scale
from autosel.errors import AutoselError

REF = torch.randn(20, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SCALE = torch.full_like(REF, 0.125)


def judge(out, ref=REF, dtype="float32", accuracy="exact", **more):
    return compare(out.to(getattr(torch, dtype)), ref, accuracy=accuracy, act_dtype=dtype, **more)


def off(units, rows=slice(None), columns=slice(None)):
    """REF with an error of ``units`` error scales of alternating sign, at some places."""
    error = torch.zeros_like(REF)
    sign = 1 - 2 * (torch.arange(REF.numel()) % 2).double().reshape(REF.shape)
    error[rows, columns] = units * 0.125
    return REF + error * sign


@pytest.mark.parametrize("accuracy", LIMITS)
@pytest.mark.parametrize("share", [0.5, 0.99, 1.01, 1.5])
def test_each_limit_is_where_it_is_said_to_be(accuracy, share):
    limits = LIMITS[accuracy]
    places = {
        "all tokens": (limits.rms, slice(None), slice(None)),
        "token 3": (limits.token, 3, slice(None)),
        "token 3 output 5": (limits.element, 3, 5),
    }
    for where, (limit, rows, columns) in places.items():
        verdict = judge(off(share * limit, rows, columns), accuracy=accuracy, scale=SCALE)
        assert verdict.score == pytest.approx(share, rel=1e-5)
        assert verdict.status == ("ok" if share < 1 else "wrong")
        assert bool(verdict) == (share < 1)
        if share > 1:
            assert verdict.reason.startswith(f"{where}: error over rounding: found ")
            assert f"at most {limit:g}" in verdict.reason


@pytest.mark.parametrize("accuracy", LIMITS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_without_a_scale_the_limits_follow_the_size_of_each_row(accuracy, dtype):
    ref = REF * torch.logspace(0, 0.3, 20, dtype=torch.float64).unsqueeze(1)
    sign = 1 - 2 * (torch.arange(REF.numel()) % 2).double().reshape(REF.shape)
    error = nominal_scale(ref, accuracy, dtype) * sign * LIMITS[accuracy].rms
    out = ref.to(getattr(torch, dtype)).double()
    # What the type itself cannot hold is a small part of either side.
    assert judge(out + 0.5 * error, ref, dtype, accuracy).status == "ok"
    assert judge(out + 1.5 * error, ref, dtype, accuracy).status == "wrong"


def test_the_classes_differ():
    out = REF + 0.02 * REF.square().mean().sqrt() * torch.sign(REF)
    assert judge(out, dtype="bfloat16").status == "wrong"
    assert judge(out, dtype="bfloat16", accuracy="a8").status == "ok"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0, 0), (19, 63), (slice(None), slice(None))])
def test_non_finite_is_its_own_verdict(bad, where):
    out = REF.clone()
    out[where] = bad
    verdict = judge(out, scale=SCALE)
    assert verdict.status == "nonfinite"
    assert "output: non-finite: found" in verdict.reason
    assert "overflow" not in verdict.reason
    assert verdict.errors is None
    assert verdict.score is None


def test_overflow_is_named():
    out = REF.clone()
    out[3, 4] = math.inf
    marked = torch.zeros(20, dtype=torch.bool)
    marked[3] = True
    assert "it overflows float16" in judge(out, dtype="float16", overflows=marked).reason
    # Another token's overflow excuses nothing.
    assert "overflow" not in judge(out, dtype="float16", overflows=~marked).reason
    ref = REF.clone()
    ref[3, 4] = 1e5
    verdict = judge(ref, ref, dtype="float16")
    assert verdict.status == "nonfinite"
    assert "it overflows float16: a number on the way is above 65504" in verdict.reason


def test_a_reference_that_is_not_finite_cannot_judge():
    ref = REF.clone()
    ref[0, 0] = math.nan
    with pytest.raises(AutoselError, match="reference: values: found 1 not finite"):
        judge(REF, ref)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_excuses_nothing(bad):
    scale = SCALE.clone()
    scale[3, 3] = bad
    with pytest.raises(AutoselError, match="error scale: values: found 1 not finite"):
        judge(REF, scale=scale)


def test_shape_and_type_are_verdicts():
    assert judge(REF[:, :32]).reason == "output: shape: found [20, 32], expected [20, 64]"
    verdict = compare(REF.half(), REF, accuracy="exact", act_dtype="bfloat16")
    assert verdict.status == "wrong"
    assert verdict.reason == "output: dtype: found torch.float16, expected torch.bfloat16"


def test_a_token_served_nowhere_must_be_exactly_zero():
    ref, scale = REF.clone(), SCALE.clone()
    ref[7], scale[7] = 0.0, 0.0
    assert judge(ref, ref, scale=scale).status == "ok"
    out = ref.clone()
    out[7, 0] = 1e-6
    verdict = judge(out, ref, scale=scale)
    assert verdict.status == "wrong"
    assert verdict.reason.startswith("token 7")
    assert verdict.errors.rel_rms_worst_token is None


def test_all_zeros_and_no_tokens():
    zero = torch.zeros(3, 8, dtype=torch.float64)
    for scale in (None, zero):
        assert judge(zero, zero, scale=scale).status == "ok"
    assert judge(zero + 1, zero, scale=zero).status == "wrong"
    assert judge(zero + 1, zero).status == "wrong"
    assert judge(zero[:0], zero[:0]).status == "ok"


def test_figures_are_what_they_say():
    ref = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    out = ref + torch.tensor([[0.0, 0.1], [-0.2, 0.0]])
    figures = judge(out, ref, dtype="float32").errors
    rms = math.sqrt(26 / 4)
    assert figures.rel_rms == pytest.approx(math.sqrt(0.05 / 26), rel=1e-6)
    assert figures.rel_rms_worst_token == pytest.approx(0.2, rel=1e-6)
    assert figures.rel_max == pytest.approx(0.2 / rms, rel=1e-6)
    assert figures.bias == pytest.approx(-0.025 / rms, rel=1e-5)
