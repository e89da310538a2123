"""``autosel plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    LayerOptions,
    cache_option,
    db_option,
    device_option,
    layer_options,
    names,
    require_option,
    routing_option,
    target_argument,
)
from autosel.cli.report import Report, note

if TYPE_CHECKING:
    from autosel.cli.target import Layer


@click.command(cls=Command)
@target_argument
@click.option(
    "--weight-budget", "budget", metavar="1.0x|1.5x|12GiB", default="1.0x", show_default=True,
    help="Memory for packed weights: copies of the smallest packing, or bytes of the whole model.",
)  # fmt: skip
@click.option(
    "--histogram", metavar="FILE|PRESET", default="mixed", show_default=True,
    help="Calls by tokens: CSV, JSON, Prometheus text of vLLM, or decode-heavy, mixed, "
    "prefill-heavy, decode-only, prefill-only.",
)  # fmt: skip
@click.option(
    "--backends", type=names, metavar="NAME,NAME,...", default=(), show_default="all",
    help="Backends that may be chosen.",
)  # fmt: skip
@click.option(
    "--exclude", type=names, metavar="NAME,NAME,...", default=(),
    help="Backends that may not be chosen.",
)  # fmt: skip
@click.option(
    "--allow-a8", is_flag=True, help="Let backends that quantise activations to 8 bits be chosen."
)
@require_option
@click.option("--dry-run", is_flag=True, help="Show the plan and do not store it.")
@layer_options
@routing_option
@device_option
@cache_option
@db_option
def command(
    target: str,
    budget: str,
    histogram: str,
    backends: tuple[str, ...],
    exclude: tuple[str, ...],
    allow_a8: bool,
    require: tuple[str, ...],
    dry_run: bool,
    layer_options: LayerOptions,
    routing: str,
    device: str | None,
    cache: str,
    db: str | None,
) -> Report:
    """Choose which packed copies of the weights stay resident, for a workload and a byte budget.

    From the database alone. Says what each token range runs then, what every range's winner would
    take, what one more copy costs and gains, at which traffic another single copy would be better,
    and which single copy suits a server that only decodes or only prefills. The plan is stored; the
    layer and packs use the last one.
    """
    from autosel import planning
    from autosel.cli.database import reading
    from autosel.cli.plans import plan_parts
    from autosel.cli.target import check_routing, resolve, retype
    from autosel.core import Plan
    from autosel.device import detect
    from autosel.weight_budget import WeightBudget
    from autosel.workload import load

    policy = planning.Policy(
        workload=load(histogram),
        budget=WeightBudget.parse(budget),
        allow_a8=allow_a8,
        backends=planning.names(backends),
        exclude=planning.names(exclude),
        require=require,
    )
    found = resolve(target, layer_options)
    check_routing(routing, found)
    here = detect(device)
    kinds = [(layer.problem, _layers(found.name, layer)) for layer in found.layers]
    with reading(db) as store:
        plans = planning.plan_model(
            store, kinds, here, policy, routing=routing, timing=(("cache", cache),)
        )
        made = [plan for plan in plans if isinstance(plan, Plan)]
        unmeasured = any(
            planning.unmeasured(store, problem, here, routing, (("cache", cache),))
            for (problem, _), plan in zip(kinds, plans, strict=True)
            if not isinstance(plan, Plan)
        )
        added = 0 if dry_run else sum(planning.keep(store, plan) for plan in made)
        place = str(store.path) if store.path else None
    parts: list[Any] = []
    answers: list[dict[str, Any]] = []
    for layer, plan in zip(found.layers, plans, strict=True):
        words = {"layer": layer.label, "layers": layer.indices}
        if isinstance(plan, Plan):
            parts += plan_parts(layer.label, plan)
            answers.append({**words, "plan": plan.to_dict(), "error": None})
        else:
            note(f"error: {layer.label}: {plan}")
            answers.append({**words, "plan": None, "error": str(plan)})
    if unmeasured:
        asked = (("routing", routing, "uniform"), ("cache", cache, "cold"), ("device", device, ""))
        more = (f" --{name} {value}" for name, value, usual in asked if (value or "") != usual)
        note(f"to measure it: autosel sweep {retype(found, layer_options)}{''.join(more)}")
    if added and place:
        note(f"stored in {place}: the layer and packs use it from now on")
    data = {"target": found.name, "database": place, "stored": added, "answers": answers}
    return Report(data, parts, 0 if len(made) == len(plans) else 1)


def _layers(name: str, layer: Layer) -> int:
    """Layers of the model that are alike: those of the checkpoint, else as the preset has."""
    from autosel import presets

    return len(layer.indices) or presets.find(name).num_moe_layers
