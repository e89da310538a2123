"""Plans how each MoE layer is read: which tensors, in which scheme, or why not.

Planning reads headers, and of expert 0 the small tensors that decide the scheme (zero points,
group index, bias). It never reads a packed weight.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autosel.core import Problem, QuantScheme
from autosel.errors import AutoselError, CheckpointError, field_error
from autosel.expert_names import CORRECTION_BIASES, STANDARD, ExpertNames, LinearTensors
from autosel.formats import all_formats
from autosel.formats.base import Format, Header, LinearQuant, Probe, Rules, Verdict
from autosel.model_config import ModelConfig
from autosel.moe_layer import (
    LayerPlan,
    LinearSource,
    MoELayer,
    missing_projection,
    origin_of,
    read_tensor,
)
from autosel.tensor_index import TensorIndex, TensorReader

_SCALE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class LayerPlanner:
    """Plans the layers of one checkpoint."""

    def __init__(
        self, config: ModelConfig, index: TensorIndex, fmt: Format | None, rules: Rules | None
    ) -> None:
        self._config = config
        self._index = index
        self._format = fmt
        self._rules = rules
        self._weights = {known.weight for known in all_formats()}

    def plan(self, names: ExpertNames, position: int, reader: TensorReader) -> LayerPlan:
        """Never raises for a fault of this layer alone: that is a refused layer with a reason."""
        config = self._config
        shared = config.num_shared_experts
        base = MoELayer(
            index=position,
            name=names.module,
            format=self._format.name if self._format else "none",
            status="refused",
            num_experts=config.num_experts,
            num_shared_experts=int(bool(names.shared)) if shared is None else shared,
            notes=self._router_notes(names),
        )
        plan = LayerPlan(base, names, self._format)
        try:
            base = replace(base, router=config.router(_corrects(names)))
            plan.layer = self._plan(plan, base, reader)
        except AutoselError as exc:
            plan.layer = replace(base, reason=str(exc))
        return plan

    def _plan(self, plan: LayerPlan, base: MoELayer, reader: TensorReader) -> MoELayer:
        names = plan.names
        if not names.linears:
            found = f"only {names.unknown[0]}" if names.unknown else "none beside the router"
            raise CheckpointError(field_error(names.parent, "experts", found, "known tensor names"))
        notes = list(base.notes)
        reason = self._unquantized(names)
        if reason is not None:
            return replace(base, status="unquantized", reason=reason)
        fmt, rules = self._format, self._rules
        if fmt is None or rules is None:
            raise CheckpointError(
                f"{names.module}: found packed experts, but no quantization_config in config.json"
            )
        self._require_packed(names, fmt)
        self._require_complete(names)
        quants = {key: self._quant(names, key, rules, notes) for key in names.linears}
        plan.sources = self._sources(names, fmt, quants)
        # From here on every projection can be dequantised; what follows is about stacking them.
        problem = self._problem(plan, fmt, reader, notes)
        return replace(base, status="quantized", problem=problem, notes=tuple(notes))

    def _router_notes(self, names: ExpertNames) -> tuple[str, ...]:
        for below in names.router:
            if below.rsplit(".", 1)[-1] in self._weights:
                return (f"{names.parent}: the router is quantised; it is not read",)
        return ()

    def _unquantized(self, names: ExpertNames) -> str | None:
        """Why the whole layer counts as not quantised, or None."""
        verdicts = []
        for key in names.linears:
            found = self._verdicts(names, key)
            verdicts.append(next((v for v in found if v.kind == "excluded"), None))
        packed = [lin for lin in names.linears.values() if self._weights & lin.names.keys()]
        plain = [lin for lin in names.linears.values() if self._is_plain(lin)]
        if all(verdict is not None for verdict in verdicts):
            assert verdicts[0] is not None
            extra = (
                ""
                if not packed
                else (
                    f"; the files hold packed weights for it all the same ({packed[0].module}), "
                    "which are not read"
                )
            )
            return verdicts[0].reason + extra
        if len(plain) == len(names.linears):
            dtype = self._index.tensors[plain[0].names["weight"]].dtype
            return f"all its weights are stored as {dtype}"
        return None

    def _verdicts(self, names: ExpertNames, key: tuple[int | None, str]) -> list[Verdict]:
        """What the config says of a linear; a stacked one is also known by its children's names."""
        if self._rules is None:
            return []
        expert, projection = key
        modules = [names.linears[key].module]
        if expert is None:
            parts = ("gate", "up") if projection == "gate_up" else (projection,)
            modules += [f"{names.module}.0.{STANDARD[part]}" for part in parts]
        return [self._rules.verdict(module) for module in modules]

    def _is_plain(self, linear: LinearTensors) -> bool:
        name = linear.names.get("weight")
        return (
            name is not None
            and not self._weights & linear.names.keys()
            and self._index.tensors[name].dtype in ("F64", "F32", "F16", "BF16")
        )

    def _require_packed(self, names: ExpertNames, fmt: Format) -> None:
        for (expert, projection), linear in names.linears.items():
            if fmt.weight in linear.names:
                continue
            name, what = next(iter(linear.names.items()))
            info = self._index.tensors[linear.names.get("weight", what)]
            raise CheckpointError(
                field_error(
                    f"{info.file}: {info.name}",
                    _who(names, expert, projection),
                    f"{'unquantised' if name == 'weight' else 'no packed'} weight "
                    f"({info.dtype} {list(info.shape)})",
                    f"{linear.module}.{fmt.weight}",
                )
            )

    def _require_complete(self, names: ExpertNames) -> None:
        """Each expert from 0 on has each projection, and there is no expert too many."""
        gated = self._config.activation().gated
        count = self._config.num_experts
        needed = ("gate", "up", "down") if gated else ("up", "down")
        present = names.linears.keys()
        for expert in range(count):
            for projection in needed:
                keys = {(expert, projection), (None, projection)}
                if projection != "down" and gated:
                    keys |= {(expert, "gate_up"), (None, "gate_up")}
                if not keys & present:
                    raise CheckpointError(missing_projection(names, expert, projection))
        for (_, projection), linear in names.linears.items():
            if linear.expert is not None and linear.expert >= count:
                raise CheckpointError(
                    field_error(
                        linear.module,
                        "expert number",
                        linear.expert,
                        f"below {count} (experts in config.json)",
                    )
                )
            if projection not in (*needed, "gate_up") or (projection == "gate_up" and not gated):
                raise CheckpointError(
                    field_error(
                        linear.module,
                        f"projection with activation {self._config.activation().name}",
                        projection,
                        " and ".join(needed),
                    )
                )
            if projection == "gate_up":
                self._require_known_halves(linear)

    def _require_known_halves(self, linear: LinearTensors) -> None:
        family = self._config.family
        if family is None or not family.stacked_halves:
            kind = "alternate" if family is not None else "unknown"
            raise CheckpointError(
                field_error(
                    linear.module,
                    f"order of gate and up rows for model_type {self._config.model_type!r}",
                    kind,
                    "all gate rows before all up rows",
                )
            )

    def _quant(
        self, names: ExpertNames, key: tuple[int | None, str], rules: Rules, notes: list[str]
    ) -> LinearQuant:
        verdict = self._verdicts(names, key)[0]
        linear = names.linears[key]
        if verdict.kind == "excluded":
            note = f"{names.module}: partly {verdict.reason}, but packed like the rest; it is read"
            if note not in notes:
                notes.append(note)
            verdict = rules.verdict(linear.module, exclusions=False)
        if verdict.quant is None:
            raise CheckpointError(f"{linear.module}: {verdict.reason}")
        return verdict.quant

    def _sources(
        self, names: ExpertNames, fmt: Format, quants: dict[tuple[int | None, str], LinearQuant]
    ) -> dict[tuple[int | None, str], LinearSource]:
        """Check every header of the layer against the sizes that expert 0 sets."""
        hidden = self._config.hidden_size
        headers = {key: self._headers(linear) for key, linear in names.linears.items()}
        first = next(key for key in names.linears if key[1] in ("up", "gate_up"))
        shape = headers[first][fmt.weight][1]
        if len(shape) != 2:
            raise CheckpointError(
                field_error(names.linears[first].module, "weight dimensions", len(shape), 2)
            )
        width = fmt.num_outputs(quants[first], shape)
        if first[1] == "gate_up":
            width //= 2
        stated = self._config.intermediate_size
        if stated is not None and stated != width:
            raise CheckpointError(
                field_error(
                    f"{names.linears[first].module}.{fmt.weight}",
                    "intermediate size",
                    width,
                    f"{stated} (config.json)",
                )
            )
        sizes = {
            "gate": (width, hidden),
            "up": (width, hidden),
            "gate_up": (2 * width, hidden),
            "down": (hidden, width),
        }
        sources = {}
        checked = set()
        for key, linear in names.linears.items():
            outputs, inputs = sizes[key[1]]
            # Thousands of experts look alike: equal headers are checked once.
            signature = (quants[key], outputs, inputs, frozenset(headers[key].items()))
            if signature not in checked:
                origin = origin_of(self._index, linear, key[0])
                fmt.check_headers(headers[key], quants[key], outputs, inputs, origin)
                checked.add(signature)
            sources[key] = LinearSource(linear, quants[key], outputs, inputs)
        return sources

    def _headers(self, linear: LinearTensors) -> dict[str, Header]:
        """Dtype and shape of one expert's tensors; a stacked one loses its leading dimension."""
        found = {}
        for suffix, name in linear.names.items():
            info = self._index.tensors[name]
            shape = info.shape
            if linear.expert is None:
                count = self._config.num_experts
                if not shape or shape[0] != count:
                    raise CheckpointError(
                        field_error(
                            f"{info.file}: {name}", "shape", list(shape), f"[{count} experts, ...]"
                        )
                    )
                shape = shape[1:]
            found[suffix] = (info.dtype, shape)
        return found

    def _problem(
        self, plan: LayerPlan, fmt: Format, reader: TensorReader, notes: list[str]
    ) -> Problem:
        config = self._config
        dtypes = {}
        for half in ("w13", "w2"):
            chosen = {k: s for k, s in plan.sources.items() if (k[1] == "down") == (half == "w2")}
            dtypes[half] = self._require_alike(plan.names, fmt, chosen)
        probes = {p: self._probe(plan, fmt, reader, p, notes) for p in plan.projections}
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
                any(probe.g_idx is not None for probe in here),
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

    def _require_alike(
        self, names: ExpertNames, fmt: Format, sources: dict[tuple[int | None, str], LinearSource]
    ) -> str:
        """One width, group size and scale dtype; returns the dtype."""
        first: tuple[object, ...] | None = None
        first_key: tuple[int | None, str] = (None, "")
        for key, source in sources.items():
            dtype = self._index.tensors[source.tensors.names[fmt.scales]].dtype
            facts = (source.quant.num_bits, source.quant.group_size, _SCALE_NAMES[dtype])
            if first is None:
                first, first_key = facts, key
            elif facts != first:
                raise CheckpointError(
                    field_error(
                        source.tensors.module,
                        "bits, group_size, scale dtype",
                        ", ".join(map(str, facts)),
                        f"{', '.join(map(str, first))} as in {_who(names, *first_key)}",
                    )
                )
        assert first is not None
        return str(first[2])

    def _probe(
        self,
        plan: LayerPlan,
        fmt: Format,
        reader: TensorReader,
        projection: str,
        notes: list[str],
    ) -> Probe:
        source = plan.source(0, projection)
        origin = origin_of(self._index, source.tensors, 0)
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


def _corrects(names: ExpertNames) -> bool:
    return any(below in names.router for below in CORRECTION_BIASES)


def _who(names: ExpertNames, expert: int | None, projection: str) -> str:
    which = "all experts" if expert is None else f"expert {expert}"
    return f"layer {names.layer}, {which}, {projection}"
