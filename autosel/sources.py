"""Where a layer's weights come from: a recipe that is small, picklable and loads when asked.

A sweep, and a child process that runs one of its candidates, are handed a source and not the
weights themselves.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from autosel.checkpoint import Checkpoint
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import CheckpointError, field_error
from autosel.packing import pack_last, unpack_last
from autosel.rank_problem import rank_problem


class WeightSource(Protocol):
    """What a sweep needs to know about weights."""

    @property
    def problem(self) -> Problem:
        """The layer as the weights have it, known without reading a packed weight."""

    @property
    def label(self) -> str:
        """Short text for people: which model, which layer."""

    def load(self, device: str | torch.device = "cpu") -> CanonicalExperts:
        """The layer's experts on ``device``; the same bits on every call."""


#: How the label of weights that nobody trained begins; it tells no layer from another.
MADE_UP = "made-up weights"


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """One MoE layer of a checkpoint folder, or a rank's part of it.

    ``held`` are the global ids of the rank's experts in the order in which they lie; left out,
    ranks have equal runs. ``act_dtype`` replaces the model's. The folder is read anew in each
    process, so that nothing large travels.
    """

    path: str
    layer: int
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    act_dtype: str | None = None
    held: tuple[int, ...] | None = None

    @property
    def problem(self) -> Problem:
        """From headers and the small tensors of all experts, whichever a rank holds.

        Raises CheckpointError for a layer that cannot be tuned.
        """
        opened = open_checkpoint(self.path)
        layer = opened.layer(self.layer)
        if layer.problem is None:
            found = f"{layer.status} ({layer.reason})"
            where = f"{self.path}: layer {self.layer}"
            raise CheckpointError(field_error(where, "weights", found, "a quantised layer"))
        exact = opened.exact_problem(self.layer)
        whole = replace(exact, act_dtype=self.act_dtype or exact.act_dtype)
        part = rank_problem(
            whole,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            ep_rank=self.ep_rank,
            ep_size=self.ep_size,
        )
        return part if self.held is None else replace(part, num_local_experts=len(self.held))

    @property
    def label(self) -> str:
        return f"{Path(self.path).name} layer {self.layer}"

    def load(self, device: str | torch.device = "cpu") -> CanonicalExperts:
        """Read this layer; raises CheckpointError naming file, tensor and expert."""
        experts = open_checkpoint(self.path).read_experts(
            self.layer,
            act_dtype=self.act_dtype,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
            ep_rank=self.ep_rank,
            ep_size=self.ep_size,
            held=self.held,
        )
        return experts.to(device)


def open_checkpoint(path: str) -> Checkpoint:
    """The checkpoint at ``path``, opened once for all its layers until a file in it changes."""
    try:
        files = tuple(
            (entry.name, entry.stat().st_mtime_ns, entry.stat().st_size)
            for entry in sorted(os.scandir(path), key=lambda entry: entry.name)
        )
    except OSError:
        return Checkpoint.open(path)  # says what is wrong
    return _opened(path, files)


@lru_cache(maxsize=4)
def _opened(path: str, files: tuple[tuple[str, int, int], ...]) -> Checkpoint:
    return Checkpoint.open(path)


@dataclass(frozen=True, slots=True)
class RandomSource:
    """Made-up weights of a real shape, the same for one seed (and NumPy).

    Codes are uniform over their whole range, code 0 included. Zero points scatter about the
    middle. Scales are log-normal about the size that keeps a unit input's output near unit size,
    so that activations stay in a realistic range. Act-order is a random order of the inputs, one
    an expert. Every expert has a stream of random numbers of its own.
    """

    problem: Problem
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{MADE_UP}, seed {self.seed}"

    def load(self, device: str | torch.device = "cpu") -> CanonicalExperts:
        """Generated expert by expert on the CPU, so that a large layer needs one copy only."""
        return CanonicalExperts(
            self.problem,
            self._weight(self.problem.w13, self.problem.w13_shape, 0, device),
            self._weight(self.problem.w2, self.problem.w2_shape, 1, device),
        )

    def _weight(
        self,
        scheme: QuantScheme,
        shape: tuple[int, int, int],
        which: int,
        device: str | torch.device,
    ) -> QuantWeight:
        experts, outputs, inputs = shape
        made: dict[str, torch.Tensor] = {}
        for expert in range(experts):
            # A key is 128 bits wide: seed, weight and expert do not run into each other.
            rng = np.random.Generator(np.random.Philox(key=[self.seed, which << 32 | expert]))
            for name, tensor in self._expert(scheme, outputs, inputs, rng).items():
                if name not in made:
                    size = (experts, *tensor.shape)
                    made[name] = torch.empty(size, dtype=tensor.dtype, device=device)
                made[name][expert].copy_(tensor)
        return QuantWeight(
            scheme=scheme,
            num_inputs=inputs,
            codes=made["codes"],
            scales=made["scales"],
            zero_points=made.get("zero_points"),
            g_idx=made.get("g_idx"),
            bias=made.get("bias"),
        )

    def _expert(
        self, scheme: QuantScheme, outputs: int, inputs: int, rng: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        groups = scheme.num_groups(inputs)
        levels = 1 << scheme.num_bits
        made = {"codes": _random_codes(scheme, outputs, inputs, rng)}  # int32 [N, W]
        # Uniform codes spread levels / sqrt(12) about their middle.
        typical = math.sqrt(12 / inputs) / levels
        spread = _normal(rng, outputs, groups).mul_(0.3).exp_()  # [N, G]
        made["scales"] = spread.mul_(typical).to(torch_dtype(scheme.scale_dtype))
        if not scheme.symmetric:
            zeros = _normal(rng, outputs, groups).mul_(levels / 8).add_(levels / 2)
            made["zero_points"] = zeros.round_().clamp_(0, levels - 1).to(torch.uint8)  # [N, G]
        if scheme.has_g_idx:
            size = inputs if scheme.group_size == -1 else scheme.group_size
            order = torch.from_numpy(rng.permutation(inputs))
            made["g_idx"] = (order // size).to(torch.int32)  # [K]
        if self.problem.has_bias:
            bias = _normal(rng, outputs).mul_(0.1)  # [N]
            made["bias"] = bias.to(torch_dtype(self.problem.act_dtype))
        return made


def _random_codes(
    scheme: QuantScheme, outputs: int, inputs: int, rng: np.random.Generator
) -> torch.Tensor:
    """Uniform codes, packed: random words are that, save for the padding of a partial last word."""
    words = -(-inputs // scheme.pack_factor)
    raw = np.asarray(rng.bit_generator.random_raw(-(-outputs * words // 2)), dtype="<u8")
    packed = torch.from_numpy(raw.view("<i4")[: outputs * words].astype(np.int32, copy=False))
    packed = packed.reshape(outputs, words)  # int32 [N, W]
    if inputs % scheme.pack_factor:
        packed = pack_last(unpack_last(packed, scheme.num_bits, inputs), scheme.num_bits)
    return packed


def _normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))
