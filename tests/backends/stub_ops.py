"""Stand-ins for vLLM's operators that compute what the real ones do, from the packed words.

They are registered with the real schemas, check every argument against what the kernels require
and read the weights through :mod:`tests.layouts.marlin_simulation`, so that an adapter is tested
end to end on a machine without the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.layouts import marlin_simulation

MARLIN_NEW = (
    "(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales,"
    " Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, Tensor! workspace,"
    " Tensor sorted_token_ids, Tensor! expert_ids, Tensor! num_tokens_past_padded,"
    " Tensor! topk_weights, int moe_block_size, int top_k, bool mul_topk_weights, int b_type_id,"
    " int size_m, int size_n, int size_k, bool use_atomic_add, bool use_fp32_reduce,"
    " bool is_zp_float, int thread_k, int thread_n, int blocks_per_sm) -> Tensor"
)
#: Of older releases: without tile sizes, with act-order; and before expert biases.
MARLIN_OLD = (
    "(Tensor! a, Tensor? c_or_none, Tensor! b_q_weight, Tensor? b_bias_or_none, Tensor! b_scales,"
    " Tensor? global_scale, Tensor? b_zeros_or_none, Tensor? g_idx_or_none, Tensor? perm_or_none,"
    " Tensor! workspace, Tensor sorted_token_ids, Tensor! expert_ids,"
    " Tensor! num_tokens_past_padded, Tensor! topk_weights, int moe_block_size, int top_k,"
    " bool mul_topk_weights, bool is_ep, int b_q_type_id, int size_m, int size_n, int size_k,"
    " bool is_full_k, bool use_atomic_add, bool use_fp32_reduce, bool is_zp_float) -> Tensor"
)
MARLIN_ACT_ORDER = MARLIN_NEW.replace(
    " Tensor! workspace,", " Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor! workspace,"
).replace(" int size_k,", " int size_k, bool is_full_k,")
MARLIN_NO_BIAS = MARLIN_OLD.replace(" Tensor? b_bias_or_none,", "").replace(
    " Tensor? global_scale,", ""
)
ALIGN = (
    "(Tensor topk_ids, int num_experts, int block_size, Tensor! sorted_token_ids,"
    " Tensor! experts_ids, Tensor! num_tokens_post_pad, Tensor? maybe_expert_map,"
    " Tensor(a!)? scatter_idx=None) -> ()"
)

Call = dict[str, Any]
BITS = {1125899906843648: 4, 1125899907892224: 4, 1125899923621888: 8}
WITH_ZEROS = 1125899906843648


def _marlin(calls: list[Call], names: list[str]) -> Any:
    def op(*args: Any) -> torch.Tensor:
        call = dict(zip(names, args, strict=True))
        calls.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in call.items()})
        a, c = call["a"], call["c_or_none"]
        words, scales = call["b_q_weight"], call["b_scales"]
        zeros, bias = call["b_zeros_or_none"], call.get("b_bias_or_none")
        type_id = call.get("b_type_id", call.get("b_q_type_id"))
        bits, block = BITS[type_id], call["moe_block_size"]
        m, n, k = call["size_m"], call["size_n"], call["size_k"]
        for tensor in (a, c, words, scales, zeros, bias, call["topk_weights"]):
            assert tensor is None or tensor.is_contiguous()
        assert tuple(a.shape) == (m, k)
        assert tuple(c.shape) == (m * call["top_k"], n)
        assert tuple(words.shape[1:]) == (k // 16, n * bits // 2)
        assert words.dtype == torch.int32
        assert k % 64 == 0
        assert n % 64 == 0
        row_scales = call.get("a_scales")
        act_bits = 8 if a.dtype == torch.int8 else 16
        if act_bits == 8:
            assert bits == 4
            assert k % 32 == 0
            assert block >= 16
            assert row_scales.dtype == torch.float32
            assert tuple(row_scales.shape) == (m, 1)
            assert row_scales.is_contiguous()
        else:
            assert row_scales is None
            assert a.dtype == c.dtype
        assert scales.dtype == c.dtype
        assert scales.shape[2] == n
        assert k % scales.shape[1] == 0
        assert scales.shape[1] == 1 or k // scales.shape[1] in (32, 64, 128)
        assert (zeros is not None) == (type_id == WITH_ZEROS)
        assert bias is None or (tuple(bias.shape[1:]) == (n,) and bias.dtype == c.dtype)
        assert call["workspace"].dtype == torch.int32
        assert not call["workspace"].any()
        assert call["topk_weights"].dtype == torch.float32
        assert block in (8, 16, 32, 48, 64)
        assert call["use_fp32_reduce"]
        assert not call["use_atomic_add"]
        assert not call["is_zp_float"]
        assert call.get("is_full_k", True)
        assert not call.get("is_ep")
        for extra in ("global_scale", "g_idx_or_none", "perm_or_none"):
            assert call.get(extra) is None
        weights: dict[int, torch.Tensor] = {}
        used = int(call["num_tokens_past_padded"])
        sorted_ids = call["sorted_token_ids"]
        for b in range(used // block):
            expert = int(call["expert_ids"][b])
            if expert not in weights:
                tensors = {"w": words[expert], "w_scales": scales[expert]}
                if zeros is not None:
                    tensors["w_zeros"] = zeros[expert]
                read = marlin_simulation.read_gemm(tensors, "w", bits, act_bits)
                weights[expert] = read.to(a.dtype if act_bits == 16 else torch.float64)
            slots = sorted_ids[b * block : (b + 1) * block]
            slots = slots[slots < m * call["top_k"]].long()
            used_rows = slots // call["top_k"]
            if act_bits == 16:
                rows = a[used_rows].float() @ weights[expert].float().T
            else:
                rows = a[used_rows].double() @ weights[expert].T * row_scales[used_rows]
                rows = rows.float()
            if bias is not None:
                rows = rows.to(c.dtype).float()
                rows += marlin_simulation.read_bias(bias[expert]).float()
            if call["mul_topk_weights"]:
                rows *= call["topk_weights"].flatten()[slots, None]
            c[slots] = rows.to(c.dtype)
        return c

    return op


ALIGN_OLD = ALIGN.replace(", Tensor(a!)? scatter_idx=None", "")


def _align(calls: list[Call], strays: str) -> Any:
    """``strays`` says what becomes of ids that are no expert: ``indices`` (older releases, here
    an error), ``left out`` (newer ones) or ``counted`` (none known; must be noticed).
    """

    def op(
        topk_ids: torch.Tensor,
        num_experts: int,
        block_size: int,
        sorted_token_ids: torch.Tensor,
        experts_ids: torch.Tensor,
        num_tokens_post_pad: torch.Tensor,
        expert_map: torch.Tensor | None,
        scatter_idx: torch.Tensor | None = None,
    ) -> None:
        calls.append({"op": "align", "num_experts": num_experts, "block_size": block_size})
        assert scatter_idx is None
        assert topk_ids.is_contiguous()
        assert (num_experts + 31) // 32 * 32 < 1024
        ids = topk_ids.flatten().tolist()
        if strays == "indices":
            assert all(0 <= i < num_experts for i in ids)
        elif strays == "counted":
            ids = [i % num_experts for i in ids]
        there = [0 <= i < num_experts for i in ids]
        local = [int(expert_map[i]) if ok and expert_map is not None else i if ok else -1
                 for i, ok in zip(ids, there, strict=True)]  # fmt: skip
        sorted_token_ids.fill_(len(ids))
        experts_ids.fill_(-1)
        place = 0
        for e in range(num_experts):
            slots = [s for s, i in enumerate(local) if i == e]
            for start in range(0, len(slots), block_size):
                part = torch.tensor(slots[start : start + block_size], dtype=torch.int32)
                sorted_token_ids[place : place + len(part)] = part
                experts_ids[place // block_size] = e
                place += block_size
        num_tokens_post_pad.fill_(place)

    return op


@contextmanager
def registered(namespace: str, **schemas: tuple[str, Any]) -> Iterator[None]:
    """Define operators ``name=(schema, function)`` on the CPU for the length of a ``with``."""
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        for name, (schema, function) in schemas.items():
            library.define(name + schema)
            library.impl(name, function, "CPU")
        yield
    finally:
        library._destroy()
        for name in schemas:
            getattr(torch.ops, namespace).__dict__.pop(name, None)


@contextmanager
def marlin(
    schema: str = MARLIN_NEW, align: bool = True, strays: str = "left out"
) -> Iterator[list[Call]]:
    """vLLM's Marlin operator (and its alignment); yields the list of calls."""
    calls: list[Call] = []
    names = [part.split("=")[0].split()[-1] for part in schema[1 : schema.index(")")].split(",")]
    ops = {"moe_wna16_marlin_gemm": (schema, _marlin(calls, names))}
    if align:
        declared = ALIGN_OLD if strays == "indices" else ALIGN
        ops["moe_align_block_size"] = (declared, _align(calls, strays))
    with registered("_moe_C", **ops):
        yield calls
