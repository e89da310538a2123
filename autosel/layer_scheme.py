"""What scheme a layer's experts share, and the problem that describes them.

Decided from the config, from headers, and from the small tensors of expert 0 (zero points, group
index, bias), which tell what the config only promises. :func:`exact_problem` looks at those of all
experts, which is what the weights turn out to need. No packed weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from autosel.core import Problem, QuantScheme
from autosel.errors import CheckpointError, field_error
from autosel.expert_names import ExpertNames
from autosel.formats.base import Format, Probe
from autosel.model_config import ModelConfig
from autosel.moe_layer import LayerPlan, LinearSource, origin_of, read_tensor, who
from autosel.tensor_index import TensorIndex, TensorReader

_SCALE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: The projections whose experts are stacked into one matrix.
_HALVES = {"w13": ("gate", "up"), "w2": ("down",)}


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
    for half in _HALVES:
        dtypes[half] = _require_alike(index, plan.names, fmt, _members(plan, half))
    small = (fmt.zeros, fmt.g_idx, "bias", *fmt.others)
    probes = {}
    for projection in plan.projections:
        source = plan.source(0, projection)
        tensors = _read(reader, source, 0, small)
        probes[projection] = _probe(index, fmt, source, 0, tensors, notes)
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
    for half, projections in _HALVES.items():
        here = [probes[p] for p in projections if p in probes]
        quant = plan.source(0, projections[-1]).quant
        schemes[half] = QuantScheme(
            quant.num_bits,
            quant.group_size,
            # One expert that is declared asymmetric makes the stacked matrix so.
            all(source.quant.symmetric for source in _members(plan, half).values())
            and all(probe.zero_points is None for probe in here),
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


def exact_problem(
    plan: LayerPlan, problem: Problem, index: TensorIndex, reader: TensorReader
) -> Problem:
    """``problem`` with what the small tensors of every expert say, as reading the weights does.

    Only what is still open is read. A damaged tensor counts for nothing here: whoever reads the
    weights is told its name.
    """
    fmt = plan.format
    assert fmt is not None
    schemes, has_bias = {"w13": problem.w13, "w2": problem.w2}, problem.has_bias
    silent: dict[Any, dict[str, torch.Tensor]] = {}
    for half, expert, source in _one_by_one(plan):
        scheme = schemes[half]
        wanted = [fmt.zeros] if scheme.symmetric else []
        wanted += [] if scheme.has_g_idx else [fmt.g_idx]
        wanted += [] if has_bias else ["bias"]
        try:
            tensors = _read(reader, source, expert, wanted)
            # Most experts have the same bits, of which one look is enough.
            types = tuple((s, t.dtype) for s, t in tensors.items())
            kind = (source.quant, source.num_outputs, source.num_inputs, types)
            known = silent.get(kind, {})
            if all(s in known and torch.equal(t, known[s]) for s, t in tensors.items()):
                continue
            probe = _probe(index, fmt, source, expert, tensors)
        except CheckpointError:
            continue
        if all(found is None for found in (probe.zero_points, probe.g_idx, probe.bias)):
            silent[kind] = tensors
        schemes[half] = replace(
            scheme,
            symmetric=scheme.symmetric and probe.zero_points is None,
            has_g_idx=scheme.has_g_idx or probe.g_idx is not None,
        )
        has_bias = has_bias or probe.bias is not None
    return replace(problem, w13=schemes["w13"], w2=schemes["w2"], has_bias=has_bias)


def _members(plan: LayerPlan, half: str) -> dict[tuple[int | None, str], LinearSource]:
    return {k: s for k, s in plan.sources.items() if (k[1] == "down") == (half == "w2")}


def _one_by_one(plan: LayerPlan) -> Iterator[tuple[str, int, LinearSource]]:
    """Each expert's linears with the half that they are in; a stacked one once an expert."""
    for half in _HALVES:
        for (expert, _), source in _members(plan, half).items():
            for number in range(plan.layer.num_experts) if expert is None else (expert,):
                yield half, number, source


def _later_order(
    index: TensorIndex, plan: LayerPlan, fmt: Format, reader: TensorReader, projection: str
) -> bool:
    """Whether an expert after the first has an order, in a file that promises it one.

    Experts that saw no calibration data keep the plain order, and rules may promise an order to
    some experts alone; the first may be one of those without.
    """
    for expert in range(1, plan.layer.num_experts):
        source = plan.source(expert, projection)
        promised = source.quant.act_order and source.quant.num_groups(source.num_inputs) > 1
        if not promised or fmt.g_idx not in source.tensors.names:
            continue
        order = _read(reader, source, expert, [fmt.g_idx])
        if _probe(index, fmt, source, expert, order).g_idx is not None:
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


def _read(
    reader: TensorReader, source: LinearSource, expert: int, suffixes: Iterable[str]
) -> dict[str, torch.Tensor]:
    """Those of an expert's tensors that are stored."""
    return {
        suffix: read_tensor(reader, source.tensors, suffix, expert)
        for suffix in suffixes
        if suffix in source.tensors.names
    }


def _probe(
    index: TensorIndex,
    fmt: Format,
    source: LinearSource,
    expert: int,
    tensors: dict[str, torch.Tensor],
    notes: list[str] | None = None,
) -> Probe:
    """What an expert's small tensors say; ``notes`` gets what is odd in them."""
    origin = origin_of(index, source.tensors, expert)
    probe = fmt.probe(tensors, source.quant, source.num_outputs, source.num_inputs, origin)
    if notes is not None:
        notes += [note for note in origin.notes if note not in notes]
    return probe


def _same_order(left: Probe, right: Probe) -> bool:
    if left.g_idx is None or right.g_idx is None:
        return left.g_idx is right.g_idx
    return torch.equal(left.g_idx, right.g_idx)
