"""Plans how each MoE layer is read: which tensors, in which scheme, or why not.

Planning reads headers, and of some experts the small tensors that decide the scheme. It never reads
a packed weight.
"""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path

from autosel.errors import AutoselError, CheckpointError, field_error
from autosel.expert_names import CORRECTION_BIASES, STANDARD, ExpertNames, LinearTensors
from autosel.failures import is_machine_fault, is_out_of_memory, one_line
from autosel.formats import all_formats
from autosel.formats.base import Format, Header, LinearQuant, Rules, Verdict
from autosel.handlers import let_through
from autosel.layer_scheme import build_problem
from autosel.model_config import ModelConfig
from autosel.moe_layer import (
    LayerPlan,
    LinearSource,
    MoELayer,
    missing_projection,
    origin_of,
    who,
)
from autosel.tensor_index import TensorIndex, TensorReader


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
        except Exception as exc:
            let_through(exc)
            if is_out_of_memory(exc) or is_machine_fault(exc):
                raise  # no fault of this layer
            # A fault of ours must not cost the other layers; its reason says that it is one.
            plan.layer = replace(base, reason=_unexpected(exc))
        return plan

    def _plan(self, plan: LayerPlan, base: MoELayer, reader: TensorReader) -> MoELayer:
        names = plan.names
        if not names.linears:
            found = f"only {names.unknown[0]}" if names.unknown else "none beside the router"
            raise CheckpointError(field_error(names.parent, "experts", found, "known tensor names"))
        notes = list(base.notes)
        verdicts = {key: self._verdict(names, key) for key in names.linears}
        reason = self._unquantized(names, verdicts)
        if reason is not None:
            return replace(base, status="unquantized", reason=reason)
        fmt, rules = self._format, self._rules
        if fmt is None or rules is None:
            raise CheckpointError(
                f"{names.module}: found packed experts, but no quantization_config in config.json"
            )
        self._require_packed(names, fmt)
        self._require_complete(names)
        quants = {
            key: self._quant(linear, verdicts[key], rules, notes)
            for key, linear in names.linears.items()
        }
        plan.sources = self._sources(names, fmt, quants)
        # From here on every projection can be dequantised; what follows is about stacking them.
        problem = build_problem(plan, fmt, self._config, self._index, reader, notes)
        return replace(base, status="quantized", problem=problem, notes=tuple(notes))

    def _router_notes(self, names: ExpertNames) -> tuple[str, ...]:
        for below in names.router:
            if below.rsplit(".", 1)[-1] in self._weights:
                return (f"{names.parent}: the router is quantised; it is not read",)
        return ()

    def _unquantized(
        self, names: ExpertNames, verdicts: dict[tuple[int | None, str], Verdict]
    ) -> str | None:
        """Why the whole layer counts as not quantised, or None."""
        linears = names.linears.values()
        if all(verdict.kind == "excluded" for verdict in verdicts.values()):
            reason = next(iter(verdicts.values())).reason
            packed = next((lin for lin in linears if self._weights & lin.names.keys()), None)
            if packed is None:
                return reason
            return (
                f"{reason}; the files hold packed weights for it all the same ({packed.module}), "
                "which are not read"
            )
        plain = [lin for lin in linears if self._is_plain(lin)]
        if len(plain) == len(linears):
            dtype = self._index.tensors[plain[0].names["weight"]].dtype
            return f"all its weights are stored as {dtype}"
        return None

    def _verdict(self, names: ExpertNames, key: tuple[int | None, str]) -> Verdict:
        """What the config says of a linear; a stacked one is also known by its children's names."""
        if self._rules is None:
            return Verdict("untargeted", reason="there is no quantization_config")
        expert, projection = key
        verdict = self._rules.verdict(names.linears[key].module)
        if expert is not None:
            return verdict
        parts = ("gate", "up") if projection == "gate_up" else (projection,)
        children = [self._rules.verdict(f"{names.module}.0.{STANDARD[part]}") for part in parts]
        found = [v for v in (verdict, *children) if v.kind != "untargeted"]
        excluded = next((v for v in found if v.kind == "excluded"), None)
        if excluded is not None or not found:
            return excluded or verdict
        if len({v.quant for v in found}) > 1:
            schemes = " and ".join(str(v.quant) for v in found)
            return Verdict("refused", reason=f"rules differ for parts of one tensor: {schemes}")
        return found[0]

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
                    who(names, expert, projection),
                    f"{'unquantised' if name == 'weight' else 'no packed'} weight "
                    f"({info.dtype} {list(info.shape)})",
                    f"{linear.module}.{fmt.weight}",
                )
            )

    def _require_once(self, names: ExpertNames) -> None:
        """Which of two copies counts is not for us to choose."""
        twice = list(names.repeated)
        for (expert, projection), linear in names.linears.items():
            others: list[tuple[int | None, str]] = []
            if expert is not None:
                others.append((None, projection))
            if projection in ("gate", "up"):
                others += [(expert, "gate_up"), (None, "gate_up")]
            elif projection == "gate_up" and expert is not None:
                others += [(None, "gate"), (None, "up")]
            twice += [
                (linear.module, names.linears[key].module) for key in others if key in names.linears
            ]
        if twice:
            first, second = twice[0]
            raise CheckpointError(field_error(second, "weights stored", f"also as {first}", "once"))

    def _require_complete(self, names: ExpertNames) -> None:
        """Each expert from 0 on has each projection, and there is no expert too many."""
        self._require_once(names)
        gated = self._config.activation().gated
        count = self._config.num_experts
        needed = ("gate", "up", "down") if gated else ("up", "down")
        present = names.linears.keys()
        for projection in needed:
            spellings = (projection, "gate_up") if gated and projection != "down" else (projection,)
            if any((None, spelling) in present for spelling in spellings):
                continue  # stacked: the shape tells how many
            for expert in range(count):
                if not any((expert, spelling) in present for spelling in spellings):
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
        self, linear: LinearTensors, verdict: Verdict, rules: Rules, notes: list[str]
    ) -> LinearQuant:
        if verdict.kind == "excluded":
            note = f"{verdict.reason}, which names a part of the layer; it is packed and is read"
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
        if width < 1:
            raise CheckpointError(
                field_error(names.linears[first].module, "intermediate size", width, "at least 1")
            )
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


def _unexpected(exc: Exception) -> str:
    """A fault that nobody foresaw, with its place: there is no traceback of it."""
    frames = traceback.extract_tb(exc.__traceback__)
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    return f"unexpected {type(exc).__name__}: {one_line(exc)} (at {place}; please report it)"


def _corrects(names: ExpertNames) -> bool:
    return any(below in names.router for below in CORRECTION_BIASES)
