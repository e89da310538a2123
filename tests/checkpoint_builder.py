"""Writes made-up checkpoints for tests: whole folders with a config and safetensors files.

Weights are drawn as canonical codes, scales and zero points and written with a format's own
``write``; a test then damages or renames what it wants and keeps the drawn values as the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from autosel.core import QuantScheme, QuantWeight
from autosel.formats import awq, compressed_tensors, gptq
from autosel.formats.base import Format, LinearQuant
from autosel.packing import pack_last

FORMATS: dict[str, Format] = {
    "gptq": gptq.FORMAT,
    "gptq_v2": gptq.FORMAT,
    "awq": awq.FORMAT,
    "compressed-tensors": compressed_tensors.FORMAT,
}
Edit = Callable[[dict[str, torch.Tensor]], None]


def random_weight(
    outputs: int,
    inputs: int,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    g_idx: torch.Tensor | None = None,
    scale_dtype: torch.dtype = torch.float16,
    bias: bool = False,
    seed: int = 0,
) -> QuantWeight:
    """One expert's random canonical weight; zero points take every value, 0 included."""
    gen = torch.Generator().manual_seed(seed)
    scheme = QuantScheme(
        bits, group_size, symmetric, g_idx is not None, str(scale_dtype).removeprefix("torch.")
    )
    groups = scheme.num_groups(inputs)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=gen)
    scales = (torch.rand(outputs, groups, generator=gen) * 0.02 + 0.001).to(scale_dtype)
    zeros = torch.randint(0, 1 << bits, (outputs, groups), generator=gen).to(torch.uint8)
    return QuantWeight(
        scheme,
        inputs,
        pack_last(codes, bits)[None],
        scales[None],
        None if symmetric else zeros[None],
        None if g_idx is None else g_idx[None],
        (torch.rand(1, outputs, generator=gen) + 1).to(scale_dtype) if bias else None,
    )


def shuffled_g_idx(inputs: int, group_size: int, seed: int = 0) -> torch.Tensor:
    """An act-order group index: every group has its inputs, in no order."""
    gen = torch.Generator().manual_seed(seed)
    return (torch.arange(inputs) // group_size)[torch.randperm(inputs, generator=gen)].int()


@dataclass
class Made:
    """A made-up checkpoint before it is written; change any field first."""

    fmt: str = "gptq"
    layers: int = 1
    experts: int = 4
    top_k: int = 2
    hidden: int = 64
    inter: int = 32
    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    act_order: bool = False
    bias: bool = False
    scale_dtype: torch.dtype = torch.float16
    prefix: str = "model."
    config: dict[str, Any] = field(default_factory=dict)
    quant: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, QuantWeight] = field(default_factory=dict)  # by module name
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = {
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "moe_intermediate_size": self.inter,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.layers,
            "norm_topk_prob": True,
            "dtype": "float16",
            **self.config,
        }
        self.quant = {**self._quant_block(), **self.quant}
        seed = 0
        for layer in range(self.layers):
            block = f"{self.prefix}layers.{layer}.mlp"
            self.tensors[f"{block}.gate.weight"] = torch.rand(
                self.experts, self.hidden, dtype=torch.float32
            ).half()
            for expert in range(self.experts):
                for proj, outputs, inputs in (
                    ("gate_proj", self.inter, self.hidden),
                    ("up_proj", self.inter, self.hidden),
                    ("down_proj", self.hidden, self.inter),
                ):
                    seed += 1
                    # gate and up see the same inputs, so their order is the same
                    order = seed if proj == "down_proj" else layer * self.experts + expert
                    index = (
                        shuffled_g_idx(inputs, self.group_size, order)
                        if self.act_order and inputs > self.group_size
                        else None
                    )
                    weight = random_weight(
                        outputs,
                        inputs,
                        bits=self.bits,
                        group_size=self.group_size,
                        symmetric=self.symmetric,
                        g_idx=index,
                        scale_dtype=self.scale_dtype,
                        bias=self.bias,
                        seed=seed,
                    )
                    self.put(f"{block}.experts.{expert}.{proj}", weight)

    @property
    def linear_quant(self) -> LinearQuant:
        return LinearQuant(
            self.bits, self.group_size, self.symmetric, self.act_order, self.fmt == "gptq"
        )

    def put(self, module: str, weight: QuantWeight, quant: LinearQuant | None = None) -> None:
        """Store a linear's tensors under ``module``, replacing what was there."""
        for name in [n for n in self.tensors if n.startswith(module + ".")]:
            del self.tensors[name]
        self.weights[module] = weight
        written = FORMATS[self.fmt].write(weight, quant or self.linear_quant)
        self.tensors.update({f"{module}.{suffix}": t for suffix, t in written.items()})

    def unquantise(self, module: str) -> None:
        """Replace a linear's tensors by one plain weight."""
        weight = self.weights.pop(module)
        for name in [n for n in self.tensors if n.startswith(module + ".")]:
            del self.tensors[name]
        self.tensors[f"{module}.weight"] = torch.zeros(
            weight.num_outputs, weight.num_inputs, dtype=torch.bfloat16
        )

    def stack(self, fused: bool) -> None:
        """Put all experts of each layer into 3-D tensors; ``fused`` joins gate and up too."""
        fmt = FORMATS[self.fmt]
        for layer in range(self.layers):
            base = f"{self.prefix}layers.{layer}.mlp.experts"
            for parts, target in (
                ((("gate_proj", "up_proj"), "gate_up_proj"), (("down_proj",), "down_proj"))
                if fused
                else (
                    (("gate_proj",), "gate_proj"),
                    (("up_proj",), "up_proj"),
                    (("down_proj",), "down_proj"),
                )
            ):
                stacked: dict[str, list[torch.Tensor]] = {}
                for expert in range(self.experts):
                    found = [self.weights[f"{base}.{expert}.{p}"] for p in parts]
                    whole = found[0]
                    if len(found) == 2:
                        joined = {
                            n: t if n == "g_idx" else torch.cat([t, found[1].tensors[n]], 1)
                            for n, t in whole.tensors.items()
                        }
                        whole = QuantWeight(whole.scheme, whole.num_inputs, **joined)
                    for suffix, tensor in fmt.write(whole, self.linear_quant).items():
                        stacked.setdefault(suffix, []).append(tensor)
                    for p in parts:
                        for name in list(self.tensors):
                            if name.startswith(f"{base}.{expert}.{p}."):
                                del self.tensors[name]
                for suffix, tensors in stacked.items():
                    self.tensors[f"{base}.{target}.{suffix}"] = torch.stack(tensors)

    def write(self, folder: Path, *, shards: int = 1, nested: str | None = None) -> Path:
        """Write the folder; ``nested`` puts model and quantisation settings under that key."""
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self.config)
        if self.quant:
            config["quantization_config"] = self.quant
        if nested:
            config = {"model_type": "outer", nested: config}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        tensors = {n: t.contiguous() for n, t in self.tensors.items()}
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return folder
        names = sorted(tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = {n: tensors[n] for n in names[i::shards]}
            save_file(part, folder / file)
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    def _quant_block(self) -> dict[str, Any]:
        if self.fmt == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "zero_point": not self.symmetric,
                "version": "gemm",
            }
        if self.fmt == "compressed-tensors":
            return {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "input_activations": None,
                        "weights": {
                            "num_bits": self.bits,
                            "type": "int",
                            "symmetric": self.symmetric,
                            "strategy": "channel" if self.group_size == -1 else "group",
                            "group_size": None if self.group_size == -1 else self.group_size,
                            "actorder": "group" if self.act_order else None,
                        },
                    }
                },
                "ignore": ["lm_head"],
            }
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "sym": self.symmetric,
            "desc_act": self.act_order,
            "checkpoint_format": self.fmt,
        }


def make_checkpoint(folder: Path, edit: Edit | None = None, **facts: Any) -> Path:
    """A written checkpoint; ``edit`` changes its tensors, keywords are those of :class:`Made`."""
    made = Made(**facts)
    if edit is not None:
        edit(made.tensors)
    return made.write(folder)
