"""compressed-tensors' own compressor against our reader, where that package is installed."""

from __future__ import annotations

import random

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.formats.base import LinearQuant, Origin
from autosel.formats.compressed_tensors import FORMAT

pytestmark = pytest.mark.integration
packer = pytest.importorskip(
    "compressed_tensors.compressors.quantized_compressors.pack_quantized",
    reason="compressed-tensors 0.13 (with transformers) is not installed",
    exc_type=ImportError,
)
quantization = pytest.importorskip("compressed_tensors.quantization")


@pytest.mark.parametrize("seed", range(60))
def test_random_linears_equal_the_tools_own_decompression(seed: int) -> None:
    compressor = packer.PackedQuantizationCompressor.__new__(packer.PackedQuantizationCompressor)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    bits, symmetric = rng.choice([4, 8]), rng.random() < 0.5
    group_size = rng.choice([-1, 16, 32, 64])
    outputs = rng.choice([1, 3, 8, 13, 64])
    groups = 1 if group_size == -1 else rng.choice([1, 2, 3, 5])
    inputs = rng.choice([8, 13, 40, 64]) if group_size == -1 else groups * group_size
    ordered = groups > 1 and rng.random() < 0.5
    args = quantization.QuantizationArgs(
        num_bits=bits,
        type="int",
        symmetric=symmetric,
        strategy="channel" if group_size == -1 else "group",
        group_size=None if group_size == -1 else group_size,
        actorder="group" if ordered else None,
    )
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32])
    scale = (torch.rand(outputs, groups) * 0.1 + 0.01).to(dtype)
    half = 1 << (bits - 1)
    zeros = None if symmetric else torch.randint(-half, half, (outputs, groups), dtype=torch.int8)
    g_idx = None
    if ordered:
        g_idx = (torch.arange(inputs) // group_size)[torch.randperm(inputs)].int()
    tensors = dict(
        compressor.compress_weight(
            weight=torch.randn(outputs, inputs).to(dtype),
            scale=scale,
            quantization_args=args,
            zero_point=zeros,
            g_idx=g_idx,
        )
    )
    tensors.setdefault("weight_scale", scale)
    if g_idx is not None:
        tensors["weight_g_idx"] = g_idx
    if zeros is not None:
        packed = packer.pack_to_int32(zeros, bits, packed_dim=0)
        tensors.setdefault("weight_zero_point", packed)
    expected = compressor.decompress_weight(dict(tensors), args)
    quant = LinearQuant(bits, group_size, symmetric, ordered)
    found = FORMAT.read(tensors, quant, outputs, inputs, Origin("linear"))
    assert torch.equal(dequantize_expert(found, 0, dtype), expected.to(dtype))
