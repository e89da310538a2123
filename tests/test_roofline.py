"""The roofline bound against sums done by hand."""

import math

import pytest

from autosel.core import Activation, Problem, QuantScheme
from autosel.errors import AutoselError
from autosel.roofline import (
    Ceilings,
    activation_bytes,
    expected_experts_hit,
    expert_bytes,
    roofline,
    slot_flops,
)

INT4 = QuantScheme(4, 128, True)
MIXTRAL = Problem(8, 8, 2, 4096, 14336, INT4, INT4)


def test_mixtral_by_hand():
    # 3 matrices of 4096 x 14336 weights: half a byte each, and a 2-byte scale for 128 of them.
    weights = 3 * 4096 * 14336
    assert expert_bytes(MIXTRAL) == weights // 2 + weights // 128 * 2
    assert slot_flops(MIXTRAL) == 2 * weights
    assert activation_bytes(MIXTRAL, 16) == 2 * 16 * 4096 * 2


def test_one_token_is_bound_by_reading_two_experts():
    point = roofline(MIXTRAL, 1, Ceilings(read_gbps=100, matmul_tflops=1000))
    assert point.experts_hit == 2
    assert point.bound == "memory"
    assert point.time_us == pytest.approx(
        (2 * expert_bytes(MIXTRAL) + 2 * 4096 * 2) / 100e9 * 1e6, rel=1e-12
    )


def test_many_tokens_are_bound_by_multiplying():
    point = roofline(MIXTRAL, 4096, Ceilings(read_gbps=1000, matmul_tflops=10))
    assert point.experts_hit == pytest.approx(8)
    assert point.bound == "compute"
    assert point.time_us == pytest.approx(4096 * 2 * slot_flops(MIXTRAL) / 10e12 * 1e6, rel=1e-12)


def test_the_experts_really_hit_count():
    ceilings = Ceilings(100, 1000)
    one = roofline(MIXTRAL, 64, ceilings, experts_hit=1, slots=64)
    assert one.bytes == expert_bytes(MIXTRAL) + activation_bytes(MIXTRAL, 64)
    assert one.flops == 64 * slot_flops(MIXTRAL)
    assert one.time_us < roofline(MIXTRAL, 64, ceilings).time_us


def test_expected_hits_of_a_uniform_router():
    assert expected_experts_hit(MIXTRAL, 1) == pytest.approx(2)
    assert expected_experts_hit(MIXTRAL, 2) == pytest.approx(8 * (1 - 0.75**2))
    split = Problem(8, 2, 2, 64, 64, INT4, INT4)  # a quarter of the experts
    assert expected_experts_hit(split, 3) == pytest.approx(2 * (1 - 0.75**3))


def test_everything_stored_with_a_weight_is_counted():
    asym = QuantScheme(8, -1, False, has_g_idx=True, scale_dtype="float32")
    problem = Problem(
        2, 2, 1, 64, 32, asym, INT4, Activation("relu2_no_mul"), "float16", has_bias=True
    )
    w13 = 32 * 64 + 32 * 4 + 32 + 64 * 4  # codes, scales, zero points, group indices
    w2 = 64 * 32 // 2 + 64 * 2  # int4 codes and one scale a row
    bias = 2 * (32 + 64)
    assert expert_bytes(problem) == w13 + w2 + bias


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_ceilings_that_measure_nothing_are_refused(value):
    with pytest.raises(AutoselError, match="read_gbps"):
        Ceilings(value, 1)
    with pytest.raises(AutoselError, match="matmul_tflops"):
        Ceilings(1, value)
