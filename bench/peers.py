"""Other libraries' int4 MoE layers, called through their own operators.

    Marlin   vLLM's ``moe_wna16_marlin_gemm`` with its align, activation and sum operators
    Humming  just-in-time compiled kernels, "indexed" and "grouped_contiguous"

They are not dependencies. ``PEER_SO`` names a folder with vLLM's two stable-ABI libraries
(``_C_stable_libtorch.abi3.so`` and ``_moe_C_stable_libtorch.abi3.so`` of the wheel, loaded without
vLLM's Python), ``PEER_DIR`` one with the humming-kernels wheel unpacked as ``hum/humming`` and,
optionally, ``humcfg.json``: its heuristics' lists by ``"model|w13 or w2|kind"``.

Each peer gets one timed layer: group, gate_up, activation, down, weighted sum; block sizes and
kernels by the library's own rules.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.moe_cases import Weights

UINT4B8 = 1125899907892224  # vLLM's id of "unsigned 4 bit, zero point 8"
Call = Callable[..., None]  # (weights, x, ids, topk_weights, out)


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="cuda")


def load_operators(folder: str) -> None:
    for name in sorted(os.listdir(folder)):
        if name.endswith(".so"):
            torch.ops.load_library(os.path.join(folder, name))


def _along_k(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[N, K]`` to int32 ``[N, K / 8]``, first code in the low bits."""
    pairs = (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()
    return pairs.view(torch.int32)


class AlignBuffers:
    """Outputs of ``moe_align_block_size``, sized as vLLM sizes them."""

    def __init__(self, slots: int, experts: int, block: int) -> None:
        length = slots + experts * (block - 1)
        if slots < experts:
            length = min(slots * block, length)
        self.experts, self.block = experts, block
        self.sorted = _empty(length, dtype=torch.int32)
        self.expert = _empty(-(-length // block), dtype=torch.int32)
        self.padded = _empty(1, dtype=torch.int32)

    def fill(self, ids: torch.Tensor) -> None:
        torch.ops._moe_C.moe_align_block_size(
            ids, self.experts, self.block, self.sorted, self.expert, self.padded, None, None
        )


class Marlin:
    name = "marlin"

    def __init__(self, weights: Weights) -> None:
        self.shape = weights.shape
        self.tensors: list[torch.Tensor] = []
        for part in ("13", "2"):
            codes, scales = weights.codes[part], weights.scales[part]
            n, k = codes.shape[1:]
            repack = torch.ops._C.gptq_marlin_repack
            words = [repack(_along_k(c).t().contiguous(), k, n, 4, False) for c in codes]
            s = scales.transpose(1, 2).reshape(-1, 8, 8).transpose(1, 2)  # 8 x 8 blocks turned
            self.tensors += [torch.stack(words), s.reshape(len(codes), -1, n).contiguous()]
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self.workspace = torch.zeros(count * 4, dtype=torch.int32, device="cuda")

    def build(self, tokens: int) -> Call:
        s = self.shape
        slots = tokens * s.top_k
        for block in (8, 16, 32, 48, 64):  # vLLM's rule
            if slots / s.experts / block < 0.9:
                break
        align = AlignBuffers(slots, s.experts, block)
        shared = _empty(slots * max(2 * s.inner, s.hidden))
        gate_up = shared[: slots * 2 * s.inner].view(slots, 2 * s.inner)
        down = shared[: slots * s.hidden].view(slots, s.hidden)
        act = _empty(slots, s.inner)
        gemm = torch.ops._moe_C.moe_wna16_marlin_gemm

        def call(w: list[torch.Tensor], x: Any, ids: Any, topk_weights: Any, out: Any) -> None:
            align.fill(ids)
            where = (self.workspace, align.sorted, align.expert, align.padded, topk_weights, block)
            gemm(
                x,
                gate_up,
                w[0],
                None,
                w[1],
                None,
                None,
                None,
                *where,
                s.top_k,
                False,
                UINT4B8,
                tokens,
                2 * s.inner,
                s.hidden,
                False,
                True,
                False,
                -1,
                -1,
                -1,
            )
            torch.ops._C.silu_and_mul(act, gate_up)
            gemm(
                act,
                down,
                w[2],
                None,
                w[3],
                None,
                None,
                None,
                *where,
                1,
                True,
                UINT4B8,
                slots,
                s.hidden,
                s.inner,
                False,
                True,
                False,
                -1,
                -1,
                -1,
            )
            torch.ops._moe_C.moe_sum(down.view(tokens, s.top_k, s.hidden), out, None, None)

        return call


class Humming:
    """``kind``: "indexed" (rows found through a sorted list) or "grouped_contiguous"."""

    def __init__(self, weights: Weights, kind: str, peer_dir: str) -> None:
        os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
        sys.path.insert(0, os.path.join(peer_dir, "hum"))
        import humming  # noqa: F401

        os.environ.pop("HUMMING_DISABLE_PARALLEL_BUILD", None)  # it also limits the compiler
        from humming.schema import HummingInputSchema, HummingWeightSchema
        from humming.transform import prepare_and_transform_humming_tensors
        from humming.tune import get_heuristics_config

        self.shape, self.kind = weights.shape, kind
        self.name = "humming_" + kind.split("_")[0]
        lists, path = {}, os.path.join(peer_dir, "humcfg.json")
        if os.path.exists(path):
            with open(path) as file:
                lists = json.load(file)
        self.tensors: list[torch.Tensor] = []
        self.layer, self.lists = {}, {}
        for part in ("13", "2"):
            codes, scales = weights.codes[part], weights.scales[part]
            n, k = codes.shape[1:]
            tensors = {
                "weight": torch.stack([_along_k(c) for c in codes]),
                "weight_scale": scales.clone(),
            }
            self.layer[part], tensors = prepare_and_transform_humming_tensors(
                tensors=tensors,
                shape_n=n,
                shape_k=k,
                weight_schema=HummingWeightSchema(
                    b_dtype="uint4", weight_scale_group_size=self.shape.group
                ),
                input_schema=HummingInputSchema(),
                num_experts=self.shape.experts,
                pad_n_to_multiple=256,
                pad_k_to_multiple=128,
                torch_dtype=torch.bfloat16,
                device="cuda",
            )
            self.tensors += [tensors["weight"], tensors["weight_scale"]]
            known = lists.get(f"{self.shape.name}|w{part}|{kind}")
            self.lists[part] = known or get_heuristics_config(self.layer[part], gemm_type=kind)
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(count * 8, dtype=torch.int32, device="cuda")
        self.compute = json.dumps(
            {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": kind}
        )

    def _config(self, part: str, slots: int) -> dict[str, Any]:
        return next(c for low, high, c in self.lists[part] if low < slots <= high)

    def prepare(self, tokens: list[int]) -> None:
        """Compile the kernels of these token counts, in parallel."""
        from humming.kernel.humming import HummingKernel

        for part in ("13", "2"):
            wanted = [self._config(part, m * self.shape.top_k) for m in tokens]
            intervals = [[i, i + 1, c] for i, c in enumerate(wanted)]
            HummingKernel.prepare_kernels(
                self.layer[part].to_str(), self.compute, json.dumps(intervals), 0
            )

    def build(self, tokens: int) -> Call:
        from humming.forward import humming_forward, may_process_input

        s, grouped = self.shape, self.kind != "indexed"
        slots = tokens * s.top_k
        config = {part: self._config(part, slots) for part in ("13", "2")}
        # One open interval: the launcher looks its kernel up with one row first.
        tuning = {part: json.dumps([[0, 1 << 30, c]]) for part, c in config.items()}
        gate_up, act, down = (_empty(slots, n) for n in (2 * s.inner, s.inner, s.hidden))
        silu = {"activation_type": "binary_split", "activation_impl": "(a / (1.f + expf(-a))) * b"}

        def forward(
            part: str, x: torch.Tensor, w: list[torch.Tensor], out: torch.Tensor, **where: Any
        ) -> None:
            i = 0 if part == "13" else 2
            humming_forward(
                self.layer[part],
                inputs=x,
                weight=w[i],
                weight_scale=w[i + 1],
                outputs=out,
                locks=self.locks,
                valid_shape_m=slots,
                compute_config=self.compute,
                tuning_config=tuning[part],
                **where,
            )

        if not grouped:
            blocks = {part: c["block_shape"][0] for part, c in config.items()}
            aligned = {b: AlignBuffers(slots, s.experts, b) for b in set(blocks.values())}

            def call(w: list[torch.Tensor], x: Any, ids: Any, topk_weights: Any, out: Any) -> None:
                for buffers in aligned.values():
                    buffers.fill(ids)
                for part, source, target, top_k in (
                    ("13", x, gate_up, s.top_k),
                    ("2", act, down, 1),
                ):
                    b = aligned[blocks[part]]
                    forward(
                        part,
                        source,
                        w,
                        target,
                        top_k=top_k,
                        sorted_ids=b.sorted,
                        expert_ids=b.expert,
                        num_tokens_padded=b.padded,
                    )
                    if part == "13":
                        may_process_input(
                            self.layer["2"], inputs=gate_up, outputs=act, layout="normal", **silu
                        )
                weighted_sum(down.view(tokens, s.top_k, s.hidden), topk_weights, out)

            return call

        c = torch.ops._moe_C
        index = torch.arange(slots, dtype=torch.int32, device="cuda").view(tokens, s.top_k)
        offsets = _empty(s.experts + 1, dtype=torch.int64)
        inverse, rows, first, expert = (
            _empty(tokens, s.top_k, dtype=torch.int32) for _ in range(4)
        )
        size = c.moe_permute_sort_workspace_size(slots, s.experts)
        workspace = _empty(size, dtype=torch.int8)
        permuted = _empty(slots, s.hidden)

        def call_grouped(w: list[torch.Tensor], x: Any, ids: Any, weight: Any, out: Any) -> None:
            c.moe_prepare_scatter(
                ids,
                index,
                None,
                s.experts,
                s.experts,
                offsets,
                inverse,
                workspace,
                expert,
                rows,
                first,
            )
            valid = offsets[-1:]
            may_process_input(
                self.layer["13"],
                inputs=x,
                outputs=permuted,
                layout="scatter",
                scatter_idx=inverse,
                num_valid_tokens=valid,
            )
            forward("13", permuted, w, gate_up, expert_layout=offsets)
            may_process_input(
                self.layer["2"],
                inputs=gate_up,
                outputs=act,
                layout="normal",
                num_valid_tokens=valid,
                **silu,
            )
            forward("2", act, w, down, expert_layout=offsets)
            c.moe_unpermute(
                down.view(tokens, s.top_k, s.hidden),
                weight,
                inverse.flatten(),
                offsets,
                s.top_k,
                out,
            )

        return call_grouped


def weighted_sum(y: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """Humming's indexed form ends in a weighted sum that its caller supplies; ours is used."""
    from autosel.kernels.moe_reduce import reduce_kernel

    tokens, top_k, n = y.shape
    block = 256 if tokens <= 16 else 1024 if n % 1024 == 0 else 512
    reduce_kernel[(-(-n // block), tokens)](
        y,
        _zeros(tokens * top_k),
        _zeros(tokens * top_k),
        weights,
        out,
        N=n,
        E=1,
        TOPK=top_k,
        BLOCK=block,
        SORTED=False,
        WEIGHTED=True,
        PDL=False,
        num_warps=2 if block == 256 else 4,
    )


_ZEROS: dict[int, torch.Tensor] = {}


def _zeros(count: int) -> torch.Tensor:
    """Expert ids that are all served; made once, outside any graph."""
    if count not in _ZEROS:
        _ZEROS[count] = torch.zeros(count, dtype=torch.int32, device="cuda")
    return _ZEROS[count]
