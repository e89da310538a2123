"""Shapes of published MoE models, so that a layer can be tuned without its checkpoint.

The table is ``data/models.csv``; its ``source`` and ``unconfirmed`` columns say where each number
comes from and which ones nobody has checked. A preset's weights are made up
(:class:`autosel.sources.RandomSource`); its sizes are the model's.
"""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from autosel.core import Activation, Problem, QuantScheme
from autosel.errors import ConfigError, field_error
from autosel.rank_problem import rank_problem

#: The table's words for an activation; the second name is the one without a gate.
_ACTIVATIONS = {
    "silu": (Activation("silu"), Activation("silu_no_mul")),
    "gelu": (Activation("gelu"), Activation("gelu_no_mul")),
    "relu2": (None, Activation("relu2_no_mul")),
    # gpt-oss; the constants are part of what the name means.
    "swiglu (clamped, alpha 1.702)": (Activation("swigluoai"), None),
}


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of the table: the whole layer, before any split over ranks."""

    name: str
    aliases: tuple[str, ...]
    model: str
    hf_id: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_moe_layers: int
    activation: Activation
    has_bias: bool
    router_weight_on_input: bool
    columns: Mapping[str, str]

    @property
    def unconfirmed(self) -> str:
        """What in this row nobody has checked against the model's own files; empty for nothing."""
        return self.columns["unconfirmed"]


def names() -> tuple[str, ...]:
    """Every preset's name, in the table's order."""
    return tuple(preset.name for preset in presets())


def get(
    name: str,
    *,
    num_bits: int = 4,
    group_size: int = 128,
    symmetric: bool = True,
    has_g_idx: bool = False,
    act_dtype: str = "bfloat16",
    scale_dtype: str | None = None,
    tp: int = 1,
    ep: int = 1,
    experts: int | None = None,
) -> Problem:
    """The MoE layer of a published model, quantised as asked, on one rank of ``tp`` or ``ep``.

    ``tp`` divides the intermediate size and ``ep`` the experts held here; ``experts`` makes the
    whole layer smaller (``top_k`` shrinks with it) so that it fits a small machine. Scales are in
    ``scale_dtype``, by default the activations'. Where a rank's border cuts a group of w2, its
    group size is the common divisor, as for a checkpoint split that way.

    Raises ConfigError for an unknown name (with close matches) or a split that does not divide.
    """
    preset = find(name)
    if experts is not None and experts < 1:
        raise ConfigError(field_error(f"preset {preset.name}", "experts", experts, "at least 1"))
    if experts is not None and experts > preset.num_experts:
        expected = f"at most {preset.num_experts}, as the model has"
        raise ConfigError(field_error(f"preset {preset.name}", "experts", experts, expected))
    num_experts = preset.num_experts if experts is None else experts
    _check_split(preset, "tp", tp, "intermediate size", preset.intermediate_size)
    _check_split(preset, "ep", ep, "experts", num_experts)
    scheme = QuantScheme(num_bits, group_size, symmetric, has_g_idx, scale_dtype or act_dtype)
    whole = Problem(
        num_experts=num_experts,
        num_local_experts=num_experts,
        top_k=min(preset.top_k, num_experts),
        hidden_size=preset.hidden_size,
        intermediate_size=preset.intermediate_size,
        w13=scheme,
        w2=scheme,
        activation=preset.activation,
        act_dtype=act_dtype,
        has_bias=preset.has_bias,
        router_weight_on_input=preset.router_weight_on_input,
    )
    return rank_problem(whole, tp_size=tp, ep_size=ep)


def find(name: str) -> Preset:
    """The row called ``name``: a preset's name, an alias or a Hugging Face id; case is ignored."""
    wanted = _slug(name)
    table = {key: preset for preset in presets() for key in (preset.name, *preset.aliases)}
    if wanted in table:
        return table[wanted]
    close = [table[key].name for key in difflib.get_close_matches(wanted, table, n=5, cutoff=0.5)]
    hint = ", ".join(dict.fromkeys(close)) or ", ".join(names())
    raise ConfigError(field_error("preset", "name", repr(name), f"a known preset, such as {hint}"))


@cache
def presets() -> tuple[Preset, ...]:
    """The whole table."""
    file = resources.files("autosel").joinpath("data/models.csv")
    rows = csv.DictReader(file.read_text(encoding="utf-8").splitlines())
    return tuple(_preset(row) for row in rows)


def _preset(row: dict[str, str]) -> Preset:
    model = row["name"]
    first, *others = (_slug(part) for part in re.sub(r"\(.*?\)", "", model).split(" / "))
    family = first.split("-")[0]
    aliases = [f"{family}-{other}" for other in others]
    aliases += [_slug(row["hf_id"]), _slug(row["hf_id"].split("/")[-1])]
    activation = _ACTIVATIONS[row["activation"]][0 if row["gated"] == "yes" else 1]
    if activation is None:
        raise ConfigError(
            field_error("models.csv", model, f"gated={row['gated']}", "a known activation")
        )
    return Preset(
        name=first,
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias != first),
        model=model,
        hf_id=row["hf_id"],
        num_experts=int(row["num_experts"]),
        top_k=int(row["top_k"]),
        hidden_size=int(row["hidden_size"]),
        intermediate_size=int(row["moe_intermediate_size"]),
        num_moe_layers=int(row["num_moe_layers"]),
        activation=activation,
        has_bias=row["expert_bias"] == "yes",
        router_weight_on_input=row["weight_on_input"] == "yes",
        columns=row,
    )


def _slug(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower()).strip("-")


def _check_split(preset: Preset, option: str, ranks: int, what: str, size: int) -> None:
    if ranks < 1 or size % ranks:
        divisors = ", ".join(str(d) for d in range(1, min(size, 128) + 1) if size % d == 0)
        expected = f"a divisor of the {what} {size}: {divisors}"
        raise ConfigError(field_error(f"preset {preset.name}", option, ranks, expected))
