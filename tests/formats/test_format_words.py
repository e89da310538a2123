"""Hand-made words: what each format's bits mean, checked against values worked out on paper."""

from __future__ import annotations

import pytest
import torch

from autosel.canonical import dequantize_expert, expert_codes, expert_zeros
from autosel.core import QuantScheme, QuantWeight
from autosel.errors import CheckpointError
from autosel.formats import awq, compressed_tensors, gptq
from autosel.formats.base import Format, LinearQuant, Origin, normalize_g_idx
from autosel.packing import pack_last
from tests.checkpoint_builder import random_weight

V1 = LinearQuant(4, -1, True, zeros_minus_one=True)
V2 = LinearQuant(4, -1, True)


def signed(*words: int) -> torch.Tensor:
    """Unsigned words as the int32 values a file holds."""
    return torch.tensor([w - (1 << 32) if w >= 1 << 31 else w for w in words], dtype=torch.int32)


def read(fmt: Format, tensors: dict[str, torch.Tensor], quant: LinearQuant, n: int, k: int):
    return fmt.read(tensors, quant, n, k, Origin("linear"))


def gptq_tensors(codes: torch.Tensor, zero_words: torch.Tensor, scale: float, bits: int = 4):
    """codes ``[K, N]`` in one group."""
    return {
        "qweight": pack_last(codes.t().contiguous(), bits).t().contiguous(),
        "qzeros": zero_words,
        "scales": torch.full((1, codes.shape[1]), scale, dtype=torch.float16),
    }


@pytest.mark.parametrize(("word", "quant"), [(0x77777777, V1), (0x88888888, V2)])
def test_both_zero_conventions_of_gptq_give_the_same_weight(word: int, quant: LinearQuant) -> None:
    codes = torch.full((8, 8), 9)
    weight = read(gptq.FORMAT, gptq_tensors(codes, signed(word)[None], 0.5), quant, 8, 8)
    assert weight.zero_points is None
    assert torch.equal(dequantize_expert(weight, 0), torch.full((8, 8), 0.5))


def test_v2_words_read_as_v1_are_off_by_a_step_and_noticed() -> None:
    tensors = gptq_tensors(torch.full((8, 8), 9), signed(0x88888888)[None], 0.5)
    origin = Origin("linear")
    weight = gptq.FORMAT.read(tensors, V1, 8, 8, origin)
    assert torch.equal(dequantize_expert(weight, 0), torch.zeros(8, 8))
    assert "64" not in origin.notes[0]
    assert "declared symmetric, but 8 zero points are not 8" in origin.notes[0]


def test_gptq_v1_zero_of_0_borrows_from_its_neighbour() -> None:
    quant = LinearQuant(4, -1, False, zeros_minus_one=True)
    tensors = gptq_tensors(torch.full((8, 8), 3), signed(0x4444443F)[None], 0.25)
    weight = read(gptq.FORMAT, tensors, quant, 8, 8)
    assert expert_zeros(weight, 0).flatten().tolist() == [0, 5, 5, 5, 5, 5, 5, 5]
    assert dequantize_expert(weight, 0)[0].unique().tolist() == [0.75]
    # and back: a per-field minus one would give 0x4444444F
    assert torch.equal(gptq.FORMAT.write(weight, quant)["qzeros"], signed(0x4444443F)[None])


def test_gptq_v1_8_bit_zero_of_0() -> None:
    quant = LinearQuant(8, -1, False, zeros_minus_one=True)
    tensors = gptq_tensors(torch.full((4, 4), 7), signed(0x090909FF - 0x01000000)[None], 1.0, 8)
    # true zeros 0, 0x0A+..: stored = 0x0A0A0A00 - 0x01010101 modulo 2**32
    tensors["qzeros"] = signed((0x0A0A0A00 - 0x01010101) & 0xFFFFFFFF)[None]
    weight = read(gptq.FORMAT, tensors, quant, 4, 4)
    assert expert_zeros(weight, 0).flatten().tolist() == [0, 10, 10, 10]


def test_awq_zero_of_0_is_stored_as_it_is() -> None:
    quant = LinearQuant(4, -1, False)
    zeros = torch.tensor([[0, 5, 5, 5, 5, 5, 5, 5]], dtype=torch.uint8)
    # nibble i holds output [0, 2, 4, 6, 1, 3, 5, 7][i]; output 0 is nibble 0
    tensors = {
        "qweight": signed(*[0x33333333] * 8)[:, None],
        "qzeros": signed(0x55555550)[None],
        "scales": torch.full((1, 8), 0.25, dtype=torch.float16),
    }
    weight = read(awq.FORMAT, tensors, quant, 8, 8)
    assert torch.equal(expert_zeros(weight, 0).t(), zeros)
    assert dequantize_expert(weight, 0)[0].unique().tolist() == [0.75]


def test_gptq_word_holds_eight_inputs_of_one_output() -> None:
    tensors = gptq_tensors(torch.zeros(8, 8, dtype=torch.int64), signed(0x77777777)[None], 1.0)
    tensors["qweight"][0, 3] = 0x76543210
    weight = read(gptq.FORMAT, tensors, V1, 8, 8)
    assert expert_codes(weight, 0)[3].tolist() == list(range(8))
    assert expert_codes(weight, 0).sum() == 28


def test_compressed_tensors_word_holds_eight_signed_inputs() -> None:
    tensors = {
        "weight_packed": signed(0x76543210)[None],
        "weight_scale": torch.ones(1, 1, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([1, 8]),
    }
    weight = read(compressed_tensors.FORMAT, tensors, V2, 1, 8)
    assert dequantize_expert(weight, 0).tolist() == [[-8, -7, -6, -5, -4, -3, -2, -1]]


def test_awq_word_holds_eight_outputs_of_one_input() -> None:
    tensors = {
        "qweight": signed(0x75316420, *[0] * 7)[:, None],
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    weight = read(awq.FORMAT, tensors, V2, 8, 8)
    assert expert_codes(weight, 0)[:, 0].tolist() == list(range(8))
    assert expert_codes(weight, 0)[:, 1:].sum() == 0


def golden_codes(bits: int) -> torch.Tensor:
    """``q(k, n) = (7k + 3n + floor(k n / 5)) mod 2**bits`` as ``[N=64, K=32]``."""
    k, n = torch.arange(32), torch.arange(64)[:, None]
    return (7 * k + 3 * n + (k * n) // 5) % (1 << bits)


def golden_weight(bits: int) -> QuantWeight:
    scheme = QuantScheme(bits, -1, True, scale_dtype="float16")
    ones = torch.ones(1, 64, 1, dtype=torch.float16)
    return QuantWeight(scheme, 32, pack_last(golden_codes(bits), bits)[None], ones)


def test_golden_words_of_awq_and_of_the_canonical_form() -> None:
    four, eight = golden_weight(4), golden_weight(8)
    assert torch.equal(four.codes[0, 0, :2], signed(0x1A3C5E70, 0x92B4D6F8))
    assert torch.equal(four.codes[0, 1, :2], signed(0x5E7F81A3, 0xF7092B3C))
    assert torch.equal(eight.codes[0, 1, :2], signed(0x18110A03, 0x352E271F))
    written = awq.FORMAT.write(four, V2)["qweight"]
    assert written.shape == (32, 8)
    assert torch.equal(written[0, :2], signed(0x5F932C60, 0xD71BA4E8))
    assert torch.equal(written[1, :2], signed(0xD70AA3D7, 0x70A33D70))


def test_8_bit_code_130_is_one() -> None:
    codes = torch.full((128, 4), 130)
    quant = LinearQuant(8, 128, True, zeros_minus_one=True)
    weight = read(gptq.FORMAT, gptq_tensors(codes, signed(0x7F7F7F7F)[None], 0.5, 8), quant, 4, 128)
    assert dequantize_expert(weight, 0).unique().tolist() == [1.0]


def test_act_order_reads_the_scale_of_each_inputs_group() -> None:
    """SHP-8's numbers: weights 2, 1, 6, 2 and a product of 30."""
    g_idx = torch.tensor([1, 0, 1, 0, 0, 0, 0, 0], dtype=torch.int32)
    codes = torch.tensor([1, 2, 3, 4, 0, 0, 0, 0])[:, None].expand(8, 8)
    tensors = gptq_tensors(codes, signed(0)[None].expand(2, 1).contiguous(), 1.0)
    tensors["scales"] = torch.tensor([[0.5], [2.0]], dtype=torch.float16).expand(2, 8).contiguous()
    tensors["g_idx"] = g_idx
    weight = read(gptq.FORMAT, tensors, LinearQuant(4, 4, False, True), 8, 8)
    row = dequantize_expert(weight, 0)[0]
    assert row[:4].tolist() == [2, 1, 6, 2]
    assert row @ torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0]) == 30


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
def test_unpacked_zero_points_are_read_as_they_are(dtype: torch.dtype) -> None:
    expected = random_weight(16, 64, symmetric=False)
    for quant in (LinearQuant(4, 32, False, zeros_minus_one=True), LinearQuant(4, 32, False)):
        tensors = gptq.FORMAT.write(expected, quant)
        assert expected.zero_points is not None
        tensors["qzeros"] = expected.zero_points[0].t().to(dtype).contiguous()
        found = read(gptq.FORMAT, tensors, quant, 16, 64)
        assert torch.equal(found.zero_points, expected.zero_points)


@pytest.mark.parametrize("zeros", [-1.0, 16.0, 7.5, float("nan")])
def test_unpacked_zero_points_that_are_no_codes_are_refused(zeros: float) -> None:
    quant = LinearQuant(4, 32, False)
    tensors = gptq.FORMAT.write(random_weight(16, 64, symmetric=False), quant)
    tensors["qzeros"] = torch.full((2, 16), 3, dtype=torch.bfloat16)
    tensors["qzeros"][1, 4] = zeros
    with pytest.raises(CheckpointError, match=r"linear\.qzeros.*found (-1|16|7\.5|nan)"):
        read(gptq.FORMAT, tensors, quant, 16, 64)


def test_zero_points_of_another_shape_are_refused_and_never_reinterpreted() -> None:
    quant = LinearQuant(4, 32, False)
    tensors = gptq.FORMAT.write(random_weight(16, 64, symmetric=False), quant)
    tensors["qzeros"] = tensors["qzeros"].view(torch.int8)
    with pytest.raises(CheckpointError) as exc:
        read(gptq.FORMAT, tensors, quant, 16, 64)
    for part in ("linear.qzeros", "I8 [2, 8]", "I32 [2, 2]", "[2, 16]"):
        assert part in str(exc.value)


def test_compressed_tensors_signed_unpacked_zero_points_get_the_offset() -> None:
    quant = LinearQuant(4, 32, False)
    expected = random_weight(16, 64, symmetric=False)
    tensors = compressed_tensors.FORMAT.write(expected, quant)
    assert expected.zero_points is not None
    tensors["weight_zero_point"] = (expected.zero_points[0].to(torch.int16) - 8).to(torch.int8)
    found = read(compressed_tensors.FORMAT, tensors, quant, 16, 64)
    assert torch.equal(found.zero_points, expected.zero_points)


def test_symmetric_awq_with_zero_words_that_are_not_8_follows_the_words() -> None:
    expected = random_weight(16, 64, symmetric=False)
    tensors = awq.FORMAT.write(expected, V2)
    origin = Origin("linear")
    found = awq.FORMAT.read(tensors, LinearQuant(4, 32, True), 16, 64, origin)
    assert torch.equal(found.zero_points, expected.zero_points)
    assert not found.scheme.symmetric
    assert "declared symmetric" in origin.notes[0]


def overwritten(zeros: list[int]) -> int:
    """AutoGPTQ's packing of zeros less one: a negative one fills all higher bits."""
    word = 0
    for i, zero in enumerate(zeros):
        word |= ((zero - 1) << (4 * i)) & 0xFFFFFFFF
    return word


@pytest.mark.parametrize(
    ("zeros", "noted"), [([5, 5, 5, 0, 9, 9, 9, 9], True), ([5, 5, 5, 5, 9, 9, 9, 9], False)]
)
def test_zero_words_that_autogptq_overwrote_are_reported(zeros: list[int], noted: bool) -> None:
    quant = LinearQuant(4, -1, False, zeros_minus_one=True)
    tensors = gptq_tensors(
        torch.zeros(8, 8, dtype=torch.int64), signed(overwritten(zeros))[None], 1
    )
    origin = Origin("model.layers.0.x")
    gptq.FORMAT.read(tensors, quant, 8, 8, origin)
    assert bool(origin.notes) == noted
    if noted:
        assert "model.layers.0.x.qzeros" in origin.notes[0]


def test_whole_word_borrows_are_not_reported() -> None:
    """GPTQModel's files have zero points of 0 in the middle of words."""
    quant = LinearQuant(4, 32, False, zeros_minus_one=True)
    tensors = gptq.FORMAT.write(random_weight(64, 64, symmetric=False), quant)
    origin = Origin("linear")
    gptq.FORMAT.read(tensors, quant, 64, 64, origin)
    assert origin.notes == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite_are_refused_with_their_place(value: float) -> None:
    tensors = gptq.FORMAT.write(random_weight(16, 64), V2)
    tensors["scales"][1, 5] = value
    origin = Origin("m.experts.3.up_proj", 3)
    with pytest.raises(CheckpointError, match="expert 3, output 5, group 1: value: found"):
        gptq.FORMAT.read(tensors, LinearQuant(4, 32, True), 16, 64, origin)


def test_a_scale_of_0_gives_weights_of_0() -> None:
    tensors = gptq.FORMAT.write(random_weight(16, 64), V2)
    tensors["scales"][1, 5] = 0
    dense = dequantize_expert(read(gptq.FORMAT, tensors, LinearQuant(4, 32, True), 16, 64), 0)
    assert not dense[5, 32:].any()
    assert dense[5, :32].any()


def test_a_bias_of_zeros_is_dropped_and_another_is_kept() -> None:
    quant = LinearQuant(4, 32, True)
    tensors = gptq.FORMAT.write(random_weight(16, 64, bias=True), quant)
    assert read(gptq.FORMAT, tensors, quant, 16, 64).bias is not None
    tensors["bias"].zero_()
    assert read(gptq.FORMAT, tensors, quant, 16, 64).bias is None


@pytest.mark.parametrize("value", [-1, 2])
def test_a_group_index_out_of_range_is_refused(value: int) -> None:
    tensors = gptq.FORMAT.write(random_weight(16, 64), LinearQuant(4, 32, True))
    tensors["g_idx"][7] = value
    with pytest.raises(
        CheckpointError, match=f"g_idx: group index: found {value}, expected 0 to 1"
    ):
        read(gptq.FORMAT, tensors, LinearQuant(4, 32, True), 16, 64)


def test_promised_group_index_that_is_missing_is_refused() -> None:
    tensors = gptq.FORMAT.write(random_weight(16, 64), V2)
    del tensors["g_idx"]
    assert read(gptq.FORMAT, tensors, LinearQuant(4, 32, True), 16, 64).g_idx is None
    with pytest.raises(CheckpointError, match=r"linear\.g_idx: tensor: found none"):
        read(gptq.FORMAT, tensors, LinearQuant(4, 32, True, act_order=True), 16, 64)


def test_compressed_tensors_group_index_of_minus_ones_means_none() -> None:
    quant = LinearQuant(4, 32, True)
    tensors = compressed_tensors.FORMAT.write(random_weight(16, 64), quant)
    tensors["weight_g_idx"] = torch.full((64,), -1, dtype=torch.int32)
    assert read(compressed_tensors.FORMAT, tensors, quant, 16, 64).g_idx is None


def test_wrong_weight_shape_is_refused() -> None:
    tensors = compressed_tensors.FORMAT.write(random_weight(16, 64), V2)
    tensors["weight_shape"] = torch.tensor([64, 16])
    with pytest.raises(CheckpointError, match=r"weight_shape: value: found \[64, 16\]"):
        read(compressed_tensors.FORMAT, tensors, LinearQuant(4, 32, True), 16, 64)


@pytest.mark.parametrize("fmt", [gptq.FORMAT, awq.FORMAT, compressed_tensors.FORMAT])
def test_more_scale_rows_than_the_group_size_allows_are_refused_with_both_numbers(
    fmt: Format,
) -> None:
    """The table of 768 inputs with 384 of them: 12 rows expected, 24 found."""
    tensors = fmt.write(random_weight(8, 384, group_size=16), LinearQuant(4, 16, True))
    with pytest.raises(CheckpointError, match=r"group_size 32\): found \w+ \[.*24.*12"):
        read(fmt, tensors, LinearQuant(4, 32, True), 8, 384)


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [("qweight", torch.int64), ("scales", torch.float64), ("qweight", torch.int16)],
)
def test_wrong_dtypes_are_refused(suffix: str, dtype: torch.dtype) -> None:
    tensors = gptq.FORMAT.write(random_weight(16, 64), V2)
    tensors[suffix] = tensors[suffix].to(dtype)
    with pytest.raises(CheckpointError, match=rf"linear\.{suffix}"):
        read(gptq.FORMAT, tensors, LinearQuant(4, 32, True), 16, 64)


@pytest.mark.parametrize(
    "index",
    [
        torch.zeros(0, dtype=torch.int32),
        torch.tensor(1),
        torch.zeros(64),
        torch.zeros(1, 64, dtype=torch.int32),
        torch.zeros(63, dtype=torch.int32),
    ],
    ids=["empty", "scalar", "float", "2-D", "short"],
)
def test_a_group_index_of_another_type_or_shape_is_refused_in_every_format(
    index: torch.Tensor,
) -> None:
    """Also where a format does not list it among its tensors."""
    quant = LinearQuant(4, 32, True)
    with pytest.raises(CheckpointError, match=r"here: dtype and shape: .*expected I32/I64 \[64\]"):
        normalize_g_idx(index, quant, 64, "here")
