"""Parameters that a serving engine's own loader fills, one tensor at a time, and what they become.

For engines that create a layer's parameters first, stream a checkpoint's tensors into them and
convert at the end. ``FusedMoE.from_checkpoint`` does all of it in one go and needs none of this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, CheckpointError, field_error
from autosel.formats import all_formats
from autosel.formats.base import (
    DTYPE_NAMES,
    Format,
    LinearQuant,
    Origin,
    clear_padding,
    require_finite,
)
from autosel.layer import FusedMoE
from autosel.layer_axes import AXES, Cut
from autosel.layer_build import making
from autosel.layer_place import held_experts
from autosel.layer_refusals import REFUSED
from autosel.rank_problem import expert_range, rank_problem
from autosel.stacking import Stack

Shard = Literal["w1", "w3", "w2"]  # gate, up, down


class ExpertParameters(nn.Module):
    """A rank's stacked parameters of one layer in one checkpoint format.

    ``w13_<suffix>`` stacks gate before up along the outputs, ``w2_<suffix>`` is down; shapes are
    those of the format's tensors with the experts in front. Scales begin as ones, everything else
    as zeros; what was never loaded is refused at the end.
    """

    def __init__(
        self,
        format_name: str,
        problem: Problem,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        ep_rank: int = 0,
        ep_size: int = 1,
        expert_map: torch.Tensor | None = None,
        zeros_minus_one: bool = True,
        transposed: bool = False,
        device: str | torch.device = "cpu",
    ) -> None:
        """Make the parameters.

        format_name      ``gptq``, ``awq`` or ``compressed-tensors``
        problem          the whole layer
        expert_map       integer ``[num_experts]``: place of each expert here or -1, in place of
                         the equal run that ``ep_rank`` of ``ep_size`` has
        zeros_minus_one  GPTQ: zero points are stored less one (``checkpoint_format`` ``gptq``)
        transposed       two-dimensional tensors are kept the other way round: inputs first for
                         compressed-tensors, as vLLM's first version does

        Raises AutoselError for another format, UnsupportedError for sizes that do not divide, or
        that would cut a word of packed values.
        """
        super().__init__()
        self.problem, self._format = problem, _find(format_name)
        self._axes, self._transposed = AXES[format_name], transposed
        self._minus_one = zeros_minus_one and format_name == "gptq"
        run = expert_range(problem.num_experts, ep_rank, ep_size)
        #: Global ids of the experts held, in the order in which they lie.
        self._local = tuple(run) if expert_map is None else held_experts(expert_map, problem)
        # The caller's tensor may change before the layer is made.
        self._expert_map = None if expert_map is None else expert_map.clone()
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._ep_rank, self._ep_size = ep_rank, ep_size
        hidden, inter = problem.hidden_size, problem.intermediate_size
        gate = Cut.of_outputs(problem.w13, inter, hidden, tp_rank, tp_size)
        down = Cut.of_inputs(problem.w2, hidden, inter, tp_rank, tp_size)
        shards: tuple[Shard, ...] = ("w1", "w3") if problem.num_shards == 2 else ("w3",)
        self._cuts: dict[Shard, Cut] = {**dict.fromkeys(shards, gate), "w2": down}
        self._outputs: dict[Shard, int] = {**dict.fromkeys(shards, inter), "w2": hidden}
        self._loaded: set[tuple[int, Shard, str]] = set()
        for name, cut in (("w13", gate), ("w2", down)):
            for suffix in self._suffixes(cut.scheme):
                shape = self._shape(name, suffix, cut)
                made = torch.ones if suffix == self._format.scales else torch.zeros
                dtype, count = self._dtype(suffix, cut.scheme), len(self._local)
                tensor = made(count, *shape, dtype=dtype, device=device)
                parameter = nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"{name}_{suffix}", parameter)

    @property
    def load_full_w2(self) -> bool:
        """Whether every rank keeps all scale rows of w2: its inputs may belong to any group."""
        scheme = self.problem.w2
        return scheme.has_g_idx and scheme.group_size != -1

    @property
    def is_k_full(self) -> bool:
        """Whether this rank's w2 has all inputs, or none of them an order of its own."""
        return not self.problem.w2.has_g_idx or self._tp_size == 1

    @property
    def num_groups_w13(self) -> int:
        """Scale rows of w13."""
        return len(self._cuts["w3"].groups)

    @property
    def num_groups_w2(self) -> int:
        """Scale rows of w2 on this rank."""
        return len(self._cuts["w2"].groups)

    def load_weight(
        self, suffix: str, tensor: torch.Tensor, *, expert_id: int, shard_id: Shard
    ) -> bool:
        """Cut this rank's part out of a whole linear's tensor and put it in its place.

        suffix     such as ``qweight``; ``tensor`` is what the checkpoint has under it
        expert_id  global; for an expert held elsewhere nothing happens and False is returned

        Raises CheckpointError, naming expert, tensor, found and expected, for what does not fit.
        """
        where = f"expert {expert_id} {shard_id}.{suffix}"
        if shard_id not in self._cuts or not 0 <= expert_id < self.problem.num_experts:
            known = f"{', '.join(self._cuts)} of {self.problem.num_experts} experts"
            raise CheckpointError(field_error(where, "place", "none there", known))
        cut = self._cuts[shard_id]
        if suffix in self._format.others:
            return self._check_shape(tensor, shard_id, where)
        if suffix in REFUSED:
            raise CheckpointError(field_error(where, "tensor", suffix, REFUSED[suffix]))
        if suffix not in self._axes:
            raise CheckpointError(
                field_error(where, "tensor", suffix, "one of " + ", ".join(self._axes))
            )
        axes = self._axes[suffix]
        whole = cut.whole(axes, self._outputs[shard_id])
        if tuple(tensor.shape) != whole:
            raise CheckpointError(field_error(where, "shape", list(tensor.shape), list(whole)))
        if expert_id not in self._local:
            return False
        if suffix == self._format.g_idx and not cut.scheme.has_g_idx:
            return self._check_plain(tensor, cut, where)
        if suffix not in self._suffixes(cut.scheme):
            return self._check_unused(tensor, suffix, cut, where)
        slot = self._local.index(expert_id)
        place = self._place(suffix, slot, shard_id)
        stored = ExpertParameters._dtype(self, suffix, cut.scheme)
        if tensor.dtype != stored and not (
            suffix == self._format.g_idx and tensor.dtype == torch.int64
        ):
            found, wanted = (DTYPE_NAMES.get(t, str(t)) for t in (tensor.dtype, stored))
            raise CheckpointError(field_error(where, "dtype", found, wanted))
        part = self._convert(suffix, cut.take(tensor, axes, where), cut, where).to(place)
        if suffix == "bias" and shard_id == "w2" and self._tp_rank:
            part = torch.zeros_like(part)  # the ranks' outputs are summed
        other = {"w1": "w3", "w3": "w1"}.get(shard_id)
        shared = suffix == self._format.g_idx and (slot, other, suffix) in self._loaded
        if shared and not torch.equal(part, place):
            raise CheckpointError(
                field_error(where, "group index of gate and up", "different", "equal")
            )
        place.copy_(part)
        self._loaded.add((slot, shard_id, suffix))
        return True

    def experts(self) -> CanonicalExperts:
        """The filled parameters as canonical weights; CheckpointError for one that is missing."""
        local = self._rank_problem()
        self._require_biases()
        stacks = {
            "w13": Stack(len(self._local), local.num_shards * local.intermediate_size),
            "w2": Stack(len(self._local), local.hidden_size),
        }
        for slot in range(len(self._local)):
            for shard_id, cut in self._cuts.items():
                name = "w2" if shard_id == "w2" else "w13"
                row = cut.outputs if shard_id == "w3" and "w1" in self._cuts else 0
                weight = self._weight(slot, shard_id)
                stacks[name].put(slot, row, weight, f"{name} of expert {slot}")
        has_bias = local.has_bias
        w13, w2 = (
            stacks[name].finish(
                symmetric=scheme.symmetric, has_g_idx=scheme.has_g_idx, has_bias=has_bias
            )
            for name, scheme in (("w13", local.w13), ("w2", local.w2))
        )
        return CanonicalExperts(replace(local, w13=w13.scheme, w2=w2.scheme), w13, w2)

    def process_weights_after_loading(self, **options: Any) -> FusedMoE:
        """Convert and pack, and let the parameters go.

        ``options`` are those of :meth:`autosel.FusedMoE.from_experts`, without the three that say
        which experts are here: the parameters know. AutoselError where one says otherwise.
        """
        known = {
            "ep_rank": self._ep_rank, "ep_size": self._ep_size, "expert_map": self._expert_map,
        }  # fmt: skip
        with making(options):
            for name, value in known.items():
                given, kept = _plain(options.get(name, value)), _plain(value)
                if given != kept:
                    raise AutoselError(field_error("parameters", name, given, kept))
            experts = self.experts()
        for name in list(self._parameters):
            self.register_parameter(name, None)
        return FusedMoE.from_experts(experts, **{**options, **known})

    # inside ----------------------------------------------------------------------------------

    def _rank_problem(self) -> Problem:
        """What of the layer is here."""
        part = rank_problem(self.problem, tp_rank=self._tp_rank, tp_size=self._tp_size)
        return replace(part, num_local_experts=len(self._local))

    def _suffixes(self, scheme: QuantScheme) -> tuple[str, ...]:
        """The tensors that are kept for a linear of this scheme."""
        fmt = self._format
        wanted = {
            fmt.zeros: not scheme.symmetric,
            fmt.g_idx: scheme.has_g_idx,
            "bias": self.problem.has_bias,
        }
        return tuple(suffix for suffix in self._axes if wanted.get(suffix, True))

    def _dtype(self, suffix: str, scheme: QuantScheme) -> torch.dtype:
        if suffix == "bias":
            return torch_dtype(self.problem.act_dtype)
        return torch_dtype(scheme.scale_dtype) if suffix == self._format.scales else torch.int32

    def _shape(self, name: str, suffix: str, cut: Cut) -> tuple[int, ...]:
        shards = self.problem.num_shards if name == "w13" else 1
        shape = [
            cut.length(axis, f"{name}_{suffix}") * (shards if axis.endswith("out") else 1)
            for axis in self._axes[suffix]
        ]
        return tuple(shape[::-1] if self._transposed else shape)

    def _place(self, suffix: str, slot: int, shard_id: Shard) -> torch.Tensor:
        """Where a shard's tensor lies in its parameter, in the order of the format's axes."""
        name = "w2" if shard_id == "w2" else "w13"
        stacked: torch.Tensor = getattr(self, f"{name}_{suffix}").data[slot]
        if self._transposed:
            stacked = stacked.permute(*range(stacked.ndim)[::-1])
        for dim, axis in enumerate(self._axes[suffix]):
            if axis.endswith("out") and name == "w13":
                count = self._cuts[shard_id].length(axis, suffix)
                first = count if shard_id == "w3" and "w1" in self._cuts else 0
                stacked = stacked.narrow(dim, first, count)
        return stacked

    def _convert(self, suffix: str, part: torch.Tensor, cut: Cut, where: str) -> torch.Tensor:
        """A rank's part of a stored tensor as its parameter keeps it: as it is."""
        return part

    def _require_loaded(self, slot: int, shard_id: Shard, cut: Cut) -> None:
        origin = Origin(f"expert {self._local[slot]} {shard_id}")
        for suffix in self._suffixes(cut.scheme):
            if suffix != "bias" and (slot, shard_id, suffix) not in self._loaded:
                raise CheckpointError(
                    field_error(origin.label(suffix), "tensor", "never loaded", "one an expert")
                )

    def _require_biases(self) -> None:
        """A projection may be without any; but zeros in the place of some were never loaded."""
        if not self.problem.has_bias:
            return
        loaded = {place[:2] for place in self._loaded if place[2] == "bias"}
        for shard_id in self._cuts:
            missing = [s for s in range(len(self._local)) if (s, shard_id) not in loaded]
            if missing and (not loaded or len(missing) < len(self._local)):
                where = Origin(f"expert {self._local[missing[0]]} {shard_id}").label("bias")
                raise CheckpointError(field_error(where, "tensor", "never loaded", "one an expert"))

    def _weight(self, slot: int, shard_id: Shard) -> QuantWeight:
        """One linear of the parameters as canonical weights of one expert."""
        fmt, cut = self._format, self._cuts[shard_id]
        expert = self._local[slot]
        origin = Origin(f"expert {expert} {shard_id}")
        self._require_loaded(slot, shard_id, cut)
        found = {s: self._place(s, slot, shard_id).cpu() for s in self._suffixes(cut.scheme)}
        scheme = replace(cut.scheme, group_size=cut.group_size)
        quant = LinearQuant(
            scheme.num_bits, scheme.group_size, scheme.symmetric, False, self._minus_one
        )
        scales = fmt.scales_of(found[fmt.scales]).contiguous()  # [N, G]
        require_finite(scales, ("output", "group"), origin.label(fmt.scales))
        codes = fmt.codes_of(found[fmt.weight].contiguous(), quant)
        g_idx = found.get(fmt.g_idx)
        # The order is checked here, since an index may lead to any group of the whole layer.
        if g_idx is not None and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < scales.shape[1]:
            found_range = f"{int(g_idx.min())} to {int(g_idx.max())}"
            raise CheckpointError(
                field_error(
                    origin.label(fmt.g_idx), "group", found_range, f"0 to {scales.shape[1] - 1}"
                )
            )
        others = {name: t for name, t in found.items() if name in (fmt.zeros, "bias")}
        probe = fmt.probe(others, quant, cut.outputs, cut.inputs, origin)
        return QuantWeight(
            replace(scheme, symmetric=probe.zero_points is None),
            cut.inputs,
            clear_padding(codes, scheme.num_bits, cut.inputs)[None],
            scales[None],
            None if probe.zero_points is None else probe.zero_points[None],
            None if g_idx is None else g_idx[None],
            None if probe.bias is None else probe.bias[None],
        )

    def _check_shape(self, tensor: torch.Tensor, shard_id: Shard, where: str) -> bool:
        wanted = [self._outputs[shard_id], self._cuts[shard_id].inputs_total]
        if tensor.tolist() != wanted:
            raise CheckpointError(field_error(where, "value", tensor.tolist(), wanted))
        return True

    def _check_plain(self, tensor: torch.Tensor, cut: Cut, where: str) -> bool:
        """A group index that says no more than the position is not kept; another is refused."""
        size = cut.scheme.group_size
        inputs = torch.arange(cut.inputs_total)
        plain = torch.zeros_like(inputs) if size == -1 else inputs // size
        stored = tensor.long().cpu()
        if not torch.equal(stored, plain) and bool((stored != 0).any()):
            raise CheckpointError(
                field_error(where, "group index", "an order of its own", "none (no act-order)")
            )
        return True

    def _check_unused(self, tensor: torch.Tensor, suffix: str, cut: Cut, where: str) -> bool:
        """Zero points of a symmetric layer, or a bias of zeros, may be there and say nothing."""
        fmt, scheme = self._format, cut.scheme
        quant = LinearQuant(scheme.num_bits, scheme.group_size, True, False, self._minus_one)
        outputs = self._outputs["w2" if cut is self._cuts["w2"] else "w3"]
        probe = fmt.probe({suffix: tensor.cpu()}, quant, outputs, cut.inputs_total, Origin(where))
        if probe.zero_points is not None or probe.bias is not None:
            expected = "the implicit zero point" if suffix == fmt.zeros else "zeros"
            raise CheckpointError(field_error(where, "values", "others", expected))
        return True


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _find(name: str) -> Format:
    for candidate in all_formats():
        if candidate.name == name and name in AXES:
            return candidate
    raise AutoselError(field_error("ExpertParameters", "format", repr(name), ", ".join(AXES)))
