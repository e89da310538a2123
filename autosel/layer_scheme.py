"""What scheme a layer's experts share, and the problem that describes them.

Decided from the config, from headers, and from the small tensors of expert 0 (zero points, group
index, bias), which tell what the config only promises. No packed weight is read.
"""

from __future__ import annotations

import torch

from autosel.core import Problem, QuantScheme
from autosel.errors import CheckpointError, field_error
from autosel.expert_names import ExpertNames
from autosel.formats.base import Format, Probe
from autosel.model_config import ModelConfig
from autosel.moe_layer import LayerPlan, LinearSource, origin_of, read_tensor, who
from autosel.tensor_index import TensorIndex, TensorReader

_SCALE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def build_problem(
    plan: LayerPlan,
    fmt: Format,
    config: ModelConfig,
    index: TensorIndex,
    reader: TensorReader,
    notes: list[str],
) -> Problem:
    """The layer's description; raises CheckpointError where its experts cannot be stacked."""
    dtypes = {}
    for half in ("w13", "w2"):
        chosen = {k: s for k, s in plan.sources.items() if (k[1] == "down") == (half == "w2")}
        dtypes[half] = _require_alike(index, plan.names, fmt, chosen)
    probes = {p: _probe(index, plan, fmt, reader, p, notes) for p in plan.projections}
    if "gate" in probes and not _same_order(probes["gate"], probes["up"]):
        raise CheckpointError(
            field_error(
                f"{plan.names.module}.0",
                "group index of gate and up",
                "different",
                "equal (they share one stacked matrix)",
            )
        )
    schemes = {}
    members: dict[str, tuple[str, ...]] = {"w13": ("gate", "up"), "w2": ("down",)}
    for half, projections in members.items():
        here = [probes[p] for p in projections if p in probes]
        quant = plan.source(0, projections[-1]).quant
        schemes[half] = QuantScheme(
            quant.num_bits,
            quant.group_size,
            all(probe.zero_points is None for probe in here),
            any(probe.g_idx is not None for probe in here)
            or _later_order(index, plan, fmt, reader, projections[-1]),
            dtypes[half],
        )
    down = plan.source(0, "down")
    return Problem(
        num_experts=config.num_experts,
        num_local_experts=config.num_experts,
        top_k=config.top_k,
        hidden_size=config.hidden_size,
        intermediate_size=down.num_inputs,
        w13=schemes["w13"],
        w2=schemes["w2"],
        activation=config.activation(),
        act_dtype=config.act_dtype(dtypes["w13"]),
        has_bias=any(probe.bias is not None for probe in probes.values()),
        router_weight_on_input=config.router_weight_on_input,
    )


def _later_order(
    index: TensorIndex, plan: LayerPlan, fmt: Format, reader: TensorReader, projection: str
) -> bool:
    """Whether an expert after the first has an order, in a file that promises one.

    Experts that saw no calibration data keep the plain order; the first may be one of them.
    """
    source = plan.source(0, projection)
    if not source.quant.act_order or source.quant.num_groups(source.num_inputs) == 1:
        return False
    for expert in range(1, plan.layer.num_experts):
        source = plan.source(expert, projection)
        tensors = {fmt.g_idx: read_tensor(reader, source.tensors, fmt.g_idx, expert)}
        origin = origin_of(index, source.tensors, expert)
        sizes = (source.num_outputs, source.num_inputs)
        if fmt.probe(tensors, source.quant, *sizes, origin).g_idx is not None:
            return True
    return False


def _require_alike(
    index: TensorIndex,
    names: ExpertNames,
    fmt: Format,
    sources: dict[tuple[int | None, str], LinearSource],
) -> str:
    """One width, group size and scale dtype; returns the dtype."""
    first: tuple[object, ...] | None = None
    first_key: tuple[int | None, str] = (None, "")
    for key, source in sources.items():
        dtype = index.tensors[source.tensors.names[fmt.scales]].dtype
        facts = (source.quant.num_bits, source.quant.group_size, _SCALE_NAMES[dtype])
        if first is None:
            first, first_key = facts, key
        elif facts != first:
            raise CheckpointError(
                field_error(
                    source.tensors.module,
                    "bits, group_size, scale dtype",
                    ", ".join(map(str, facts)),
                    f"{', '.join(map(str, first))} as in {who(names, *first_key)}",
                )
            )
    assert first is not None
    return str(first[2])


def _probe(
    index: TensorIndex,
    plan: LayerPlan,
    fmt: Format,
    reader: TensorReader,
    projection: str,
    notes: list[str],
) -> Probe:
    source = plan.source(0, projection)
    origin = origin_of(index, source.tensors, 0)
    small = (fmt.zeros, fmt.g_idx, "bias", *fmt.others)
    tensors = {
        suffix: read_tensor(reader, source.tensors, suffix, 0)
        for suffix in small
        if suffix in source.tensors.names
    }
    probe = fmt.probe(tensors, source.quant, source.num_outputs, source.num_inputs, origin)
    notes += [note for note in origin.notes if note not in notes]
    return probe


def _same_order(left: Probe, right: Probe) -> bool:
    if left.g_idx is None or right.g_idx is None:
        return left.g_idx is right.g_idx
    return torch.equal(left.g_idx, right.g_idx)
