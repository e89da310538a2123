"""A checkpoint's expert tensors stacked and cut as vLLM's parameters are, written independently."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

#: Axis of the outputs and of the inputs in each suffix's two-dimensional tensor.
OUTPUTS = {
    "gptq": {"qweight": 1, "scales": 1, "qzeros": 1},
    "awq": {"qweight": 1, "scales": 1, "qzeros": 1},
    "compressed-tensors": {"weight_packed": 0, "weight_scale": 0, "weight_zero_point": 0},
}


def stacked(
    kind: str,
    tensors: Mapping[str, torch.Tensor],
    block: str,
    experts: Iterable[int],
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    scale_dtype: torch.dtype = torch.float16,
    tp_rank: int = 0,
    tp_size: int = 1,
) -> dict[str, torch.Tensor]:
    """``w13_<suffix>`` and ``w2_<suffix>`` of the experts with these ids.

    Column parallel linears (gate, up) are cut along their outputs, the row parallel one along its
    inputs.
    """
    gate, up, down = names
    found: dict[str, list[torch.Tensor]] = {}
    for expert in experts:
        for suffix, axis in OUTPUTS[kind].items():
            if f"{block}.{expert}.{gate}.{suffix}" not in tensors:
                continue

            def part(name: str, cut: int, suffix: str = suffix, expert: int = expert):
                tensor = tensors[f"{block}.{expert}.{name}.{suffix}"]
                if tensor.shape[cut] == 1:  # one scale a channel: every rank has it
                    return tensor
                return tensor.chunk(tp_size, cut)[tp_rank]

            both = torch.cat([part(gate, axis), part(up, axis)], axis)
            found.setdefault(f"w13_{suffix}", []).append(both)
            found.setdefault(f"w2_{suffix}", []).append(part(down, 1 - axis))
    made = {name: torch.stack(list(parts)) for name, parts in found.items()}
    return {
        name: tensor.to(scale_dtype) if tensor.is_floating_point() else tensor
        for name, tensor in made.items()
    }
