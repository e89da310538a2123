"""Real checkpoints of four tools, bit for bit against the tools' own dequantisation."""

from __future__ import annotations

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.checkpoint import Checkpoint
from autosel.core import CanonicalExperts

PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def expected_key(layer: int, name: str) -> str:
    """``...experts.3.down_proj.weight`` to the key of the expected tensor."""
    _, tail = name.split(".experts.")
    expert, proj, suffix = tail.split(".")
    assert suffix == "weight"
    return f"layers.{layer}.experts.{expert}.{PARTS.get(proj, proj.removesuffix('_proj'))}"


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements that differ in any bit."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    bits = torch.int16 if found.element_size() == 2 else torch.int32
    return int((found.view(bits) != expected.view(bits)).sum())


def test_every_weight_equals_the_tools_own(checkpoint) -> None:
    opened = Checkpoint.open(checkpoint.path)
    assert [layer.index for layer in opened.layers] == checkpoint.moe_layers
    for layer in opened.layers:
        assert layer.status == "quantized", layer.reason
        seen = set()
        for name, weight in opened.dequantize(layer.index):
            key = expected_key(layer.index, name)
            seen.add(key)
            assert differing(weight, checkpoint.expected[key]) == 0, name
            # the name is the checkpoint's own
            module = name.removesuffix(".weight")
            assert any(stored.startswith(module + ".") for stored in checkpoint.tensors)
        wanted = {k for k in checkpoint.expected if f"layers.{layer.index}.experts." in k}
        assert seen == wanted


def stacked_weights(experts: CanonicalExperts, expert: int) -> dict[str, torch.Tensor]:
    size = experts.problem.intermediate_size
    w13 = dequantize_expert(experts.w13, expert, experts.w13.scales.dtype)
    w2 = dequantize_expert(experts.w2, expert, experts.w2.scales.dtype)
    return {"gate": w13[:size], "up": w13[size:], "down": w2}


def test_stacked_experts_hold_the_same_weights(checkpoint) -> None:
    opened = Checkpoint.open(checkpoint.path)
    for layer in opened.layers:
        experts = opened.read_experts(layer.index)
        assert experts.problem == layer.problem  # listing and reading agree on the key
        for expert in range(layer.num_experts):
            for part, weight in stacked_weights(experts, expert).items():
                expected = checkpoint.expected[f"layers.{layer.index}.experts.{expert}.{part}"]
                assert differing(weight, expected) == 0, (expert, part)


def test_the_description_agrees_with_the_manifest(checkpoint) -> None:
    facts = checkpoint.facts
    for layer in Checkpoint.open(checkpoint.path).layers:
        problem = layer.problem
        assert problem is not None
        assert layer.format == facts["format"]
        assert layer.num_experts == problem.num_experts == facts["experts"]
        assert problem.top_k == facts["top_k"]
        assert problem.hidden_size == facts["hidden"]
        assert problem.intermediate_size == facts["intermediate"]
        assert problem.act_dtype == facts["dtype"]
        assert layer.num_shared_experts == facts["shared_experts"]
        assert not problem.has_bias  # AutoGPTQ's biases are all zero
        if not facts["mixed"]:
            assert problem.w13.num_bits == problem.w2.num_bits == facts["bits"]
            assert problem.w13.group_size == problem.w2.group_size == facts["group_size"]
            assert problem.w13.symmetric == problem.w2.symmetric == facts["symmetric"]


def test_routers_are_the_expected_ones(checkpoint) -> None:
    opened = Checkpoint.open(checkpoint.path)
    for layer in opened.layers:
        router = opened.router(layer.index)
        prefix = f"layers.{layer.index}.router"
        assert torch.equal(router["weight"].float(), checkpoint.expected[f"{prefix}.weight"])
        assert layer.router is not None
        has_bias = f"{prefix}.bias" in checkpoint.expected
        assert layer.router.has_correction_bias == has_bias
        if has_bias:
            found = router["e_score_correction_bias"].float()
            assert torch.equal(found, checkpoint.expected[f"{prefix}.bias"])


def test_the_routing_rule_gives_the_expected_experts(checkpoint) -> None:
    """The facts of RouterSpec, put into the plainest arithmetic."""
    opened = Checkpoint.open(checkpoint.path)
    for layer in opened.layers:
        spec, expected = layer.router, checkpoint.expected
        assert spec is not None
        router = opened.router(layer.index)
        logits = expected[f"layers.{layer.index}.input"].float() @ router["weight"].float().T
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
        choice = (
            scores + router["e_score_correction_bias"].float()
            if (spec.has_correction_bias)
            else scores
        )
        if spec.num_groups > 1:
            groups = choice.view(len(choice), spec.num_groups, -1)
            best = (
                groups.topk(2, -1).values.sum(-1)
                if spec.group_score == "top2_sum"
                else (groups.amax(-1))
            )
            kept = torch.zeros_like(best).scatter(1, best.topk(spec.topk_groups).indices, 1.0)
            choice = groups.masked_fill(kept[..., None] == 0, float("-inf")).flatten(1)
        ids = choice.topk(spec.top_k).indices
        weights = scores.gather(1, ids)
        if spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        dense = torch.zeros_like(scores).scatter(1, ids, weights * spec.scaling_factor)
        truth = torch.zeros_like(scores).scatter(
            1,
            expected[f"layers.{layer.index}.topk_ids"].long(),
            expected[f"layers.{layer.index}.topk_weights"].float(),
        )
        torch.testing.assert_close(dense, truth, rtol=2e-3, atol=2e-4)


def test_accounting_covers_every_tensor_of_the_block_once(checkpoint) -> None:
    opened = Checkpoint.open(checkpoint.path)
    rows = opened.accounting()
    assert len({row.name for row in rows}) == len(rows)
    blocks = {layer.name.removesuffix(".experts") for layer in opened.layers}
    wanted = {n for n in checkpoint.tensors if any(n.startswith(b + ".") for b in blocks)}
    assert {row.name for row in rows} == wanted
    for row in rows:
        assert row.used == (".experts." in row.name), row
        assert row.why
        stored = checkpoint.tensors[row.name]
        assert row.shape == tuple(stored.shape)


def test_act_order_is_read_where_there_is_one(get_checkpoint) -> None:
    """Ignoring the group index would give other weights: the comparison above can fail."""
    item = get_checkpoint("ct-w4-g32-sym-actgroup-qwen3moe")
    experts = Checkpoint.open(item.path).read_experts(0)
    assert experts.w13.g_idx is not None
    experts.w13.g_idx[0] = torch.arange(64) // 32
    gate = stacked_weights(experts, 0)["gate"]
    assert differing(gate, item.expected["layers.0.experts.0.gate"]) > 0


@pytest.mark.parametrize("position", [0, 5000])
def test_one_flipped_bit_in_a_real_file_is_seen(get_checkpoint, tmp_path, position: int) -> None:
    from shutil import copytree

    from safetensors.torch import load_file, save_file

    item = get_checkpoint("ct-w4-g128-sym-mixtral")
    folder = copytree(item.path, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight_packed"
    tensors[name].view(-1).view(torch.int32)[position % tensors[name].numel()] ^= 1 << 6
    save_file(tensors, folder / "model.safetensors")
    found = dict(Checkpoint.open(folder).dequantize(0))
    total = sum(differing(weight, item.expected[expected_key(0, n)]) for n, weight in found.items())
    assert total == 1
