"""Layouts against the packages' own repack kernels, and faults in them, on a CUDA device."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pytest
import torch

from autosel import registry
from autosel.align import align_block_size
from autosel.backends import _vllm_align, _vllm_ops
from autosel.core import CanonicalExperts, Device
from autosel.device import detect
from autosel.interfaces import Backend
from autosel.layouts._marlin_tiles import pack_tiles
from autosel.layouts.humming import Humming as HummingLayout
from autosel.layouts.marlin import Marlin as MarlinLayout
from autosel.packing import pack_last
from autosel.sources import RandomSource
from autosel.verify import verify_candidate
from autosel.verify_cases import Case, make_cases
from bench.verify_grid import BACKENDS
from tests.layouts import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@cache
def device() -> Device:
    return detect("cuda")


def available(name: str) -> Backend:
    backend = registry.get(name)
    support = backend.available(device())
    if not support:
        pytest.skip(str(support))
    return backend


def repack(name: str) -> Any:
    available("marlin")
    found = _vllm_ops.find("_C", name)
    if found is None:
        pytest.skip(f"_C::{name}: {_vllm_ops.why_missing('_C', name)}")
    return found


@cache
def judged(symmetric: bool) -> tuple[CanonicalExperts, list[Case]]:
    problem = make.problem(512, 256, group=128, experts=8, symmetric=symmetric)
    experts = RandomSource(problem).load("cuda")
    return experts, make_cases(experts, token_counts=(1, 17))


@pytest.mark.parametrize("fault", make.FAULTS)
@pytest.mark.parametrize("name", BACKENDS)
def test_planted_faults_are_seen(name: str, fault: str) -> None:
    """The real operator on faulty weights is judged wrong; on the right ones ok."""
    backend = available(name)
    if backend.accuracy({}) == "a8" and fault in ("nibble", "scale row", "zero point"):
        pytest.skip("one weight or row is below what 8-bit activations let a test resolve")
    experts, cases = judged(fault != "zero point")
    params = dict(backend.space(experts.problem, 17, device()).default)
    layout = backend.layout(experts.problem, params)
    packed = layout.pack(make.planted(experts, fault))
    verdict = verify_candidate(backend, packed, params, cases, experts=experts)
    assert verdict.status == "wrong", verdict
    right = verify_candidate(backend, layout.pack(experts), params, cases, experts=experts)
    assert right.status == "ok", right


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 256), (512, 1024), (4096, 64)])
def test_marlin_words_are_the_gptq_repack_kernels(bits: int, outputs: int, inputs: int) -> None:
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, device="cuda")
    words = pack_last(codes, bits).T.contiguous()  # GPTQ: [K/pf, N]
    theirs = repack("gptq_marlin_repack")(words, inputs, outputs, bits, False)
    assert torch.equal(pack_tiles(codes, bits), theirs)


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 256), (512, 1024)])
def test_marlin_words_are_the_awq_repack_kernels(outputs: int, inputs: int) -> None:
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7], device="cuda")
    nibbles = codes.T.reshape(inputs, outputs // 8, 8)[..., order]
    words = pack_last(nibbles.reshape(inputs, outputs), 4).contiguous()  # AWQ: [K, N/8]
    theirs = repack("awq_marlin_repack")(words, inputs, outputs, 4, False)
    assert torch.equal(pack_tiles(codes, 4), theirs)


@pytest.mark.parametrize("bits", [4])
@pytest.mark.parametrize(("outputs", "inputs"), [(192, 256), (512, 1024)])
def test_marlin_words_for_8_bit_activations(bits: int, outputs: int, inputs: int) -> None:
    codes = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8, device="cuda")
    words = pack_last(codes, bits).T.contiguous()
    theirs = repack("gptq_marlin_repack")(words, inputs, outputs, bits, True)
    assert torch.equal(pack_tiles(codes, bits, 8), theirs)


def humming_transform(experts: CanonicalExperts, name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One GEMM through the package's own transformation, with its repack kernel."""
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_and_transform_humming_tensors

    weight = getattr(experts, name)
    scheme = weight.scheme
    tensors = {"weight": weight.codes, "weight_scale": weight.scales}
    if weight.bias is not None:
        tensors["bias"] = weight.bias
    if weight.zero_points is not None:
        words = pack_last(weight.zero_points.transpose(1, 2), scheme.num_bits)  # [E, G, N/pf]
        tensors["zero_point"] = words.transpose(1, 2).contiguous()
    _, theirs = prepare_and_transform_humming_tensors(
        tensors=tensors,
        shape_n=weight.num_outputs,
        shape_k=weight.num_inputs,
        weight_schema=HummingWeightSchema(
            b_dtype=f"uint{scheme.num_bits}",
            weight_scale_group_size=max(0, scheme.group_size),
            has_zero_point=not scheme.symmetric,
        ),
        input_schema=HummingInputSchema(),
        num_experts=weight.num_experts,
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
        has_bias=weight.bias is not None,
        torch_dtype=dtype,
        device="cuda",
    )
    return dict(theirs)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "dtype"),
    list(itertools.product((4, 8), (32, 128, -1), (True, False), (torch.bfloat16, torch.float16))),
)
def test_humming_packs_as_the_package_does(
    bits: int, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """Our tensors against the package's own transformation, bit for bit."""
    available("humming")
    name = str(dtype).removeprefix("torch.")
    problem = make.problem(
        512, 192, bits=bits, group=group, group2=-1 if group == -1 else 32,
        symmetric=symmetric, act_dtype=name, scale_dtype=name, bias=True, experts=4,
    )  # fmt: skip
    experts = make.experts(problem).to("cuda")
    packed = HummingLayout(name).pack(experts)
    for gemm in ("w13", "w2"):
        ours = {"weight": gemm, "weight_scale": f"{gemm}_scales",
                "zero_point": f"{gemm}_zeros", "bias": f"{gemm}_bias"}  # fmt: skip
        theirs = humming_transform(experts, gemm, dtype)
        assert set(theirs) == {key for key, own in ours.items() if own in packed.tensors}
        for key, tensor in theirs.items():
            assert torch.equal(packed.tensors[ours[key]], tensor), (gemm, key)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_humming_and_marlin_repack_to_the_same_words(bits: int, group: int) -> None:
    """Both packages' own kernels on one weight: words and scales, symmetric, nothing padded."""
    available("humming")
    gptq = repack("gptq_marlin_repack")
    problem = make.problem(512, 256, bits=bits, group=group, experts=2, act_dtype="float16",
                           scale_dtype="float16")  # fmt: skip
    experts = make.experts(problem).to("cuda")
    marlin = MarlinLayout("float16").pack(experts)
    for gemm in ("w13", "w2"):
        weight = getattr(experts, gemm)
        theirs = humming_transform(experts, gemm, torch.float16)
        for e in range(2):
            words = weight.codes[e].T.contiguous()
            repacked = gptq(words, weight.num_inputs, weight.num_outputs, bits, False)
            assert torch.equal(theirs["weight"][e], repacked), gemm
        assert torch.equal(theirs["weight_scale"], marlin.tensors[f"{gemm}_scales"]), gemm


@pytest.mark.parametrize("name", BACKENDS)
def test_packing_on_the_device_equals_the_cpus(name: str) -> None:
    """And the way back is exact there too."""
    backend = registry.get(name)
    problem = make.problem(512, 256, symmetric=False, experts=4)
    experts = RandomSource(problem).load()
    layout = backend.layout(problem, dict(backend.space(problem, 16, device()).default))
    here, there = layout.pack(experts), layout.pack(experts.to("cuda"))
    assert here.tensors.keys() == there.tensors.keys()
    for key, tensor in here.tensors.items():
        assert torch.equal(there.tensors[key].cpu(), tensor), key
    if layout.invertible:
        make.assert_same(layout.unpack(there).to("cpu"), experts)


@pytest.mark.parametrize(("experts", "slots"), [(8, 16), (60, 240), (128, 8), (384, 32768)])
@pytest.mark.parametrize("block", [8, 24, 48, 64])
def test_alignment_leaves_out_ids_that_are_no_expert(experts: int, slots: int, block: int) -> None:
    """vLLM's operator against plain torch, up to the order inside an expert's run."""
    available("marlin")
    ids = torch.randint(-1, experts, (slots, 1), device="cuda", dtype=torch.int32)
    found = _vllm_align.align(ids, experts, block)
    expected = align_block_size(ids, experts, block)
    used = int(expected.num_padded)
    assert int(found.num_padded) == used
    blocks = used // block
    assert torch.equal(found.expert_ids[:blocks], expected.expert_ids[:blocks])
    owners = torch.cat([ids.flatten(), ids.new_tensor([experts])])  # padding is no expert's
    for one in (found, expected):
        one_owners = owners[one.sorted_ids[:used].long()].view(-1, block)
        wanted = expected.expert_ids[:blocks, None]
        assert ((one_owners == wanted) | (one_owners == experts)).all()
    runs = [one.sorted_ids[:used].long().sort().values for one in (found, expected)]
    assert torch.equal(*runs)
