"""``autosel sweep``."""

from __future__ import annotations

import shlex
import time
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from autosel.cli.group import Command
from autosel.cli.options import (
    Budget,
    LayerOptions,
    Number,
    budget,
    cache_option,
    db_option,
    device_option,
    duration,
    layer_options,
    names,
    require_option,
    routing_option,
    target_argument,
    token_counts,
)
from autosel.cli.report import Report, note

if TYPE_CHECKING:
    from autosel.cli.progress import SweepProgress
    from autosel.cli.stand_ins import Failures
    from autosel.cli.target import Layer, Target
    from autosel.core import Device, Plan
    from autosel.store import Store
    from autosel.tune_types import SweepResult, SweepSettings

    #: What was swept, in order.
    Results = list[tuple[Layer, SweepResult]]

#: A layer whose turn comes when the budget is used up still gets one candidate a token count.
_LEAST_BUDGET_S = 0.01


@click.command(cls=Command)
@target_argument
@click.option(
    "--tokens", type=token_counts, metavar="M,M,...", default=(), show_default="by device",
    help="Token counts to measure.",
)  # fmt: skip
@layer_options
@routing_option
@click.option(
    "--backends", type=names, metavar="NAME,NAME,...", default=(), show_default="all",
    help="Backends to try. What is stored of others competes as well.",
)  # fmt: skip
@click.option(
    "--allow-a8", is_flag=True,
    help="Let backends that quantise activations to 8 bits win; otherwise they are only reported.",
)  # fmt: skip
@click.option(
    "--trials", type=click.IntRange(1), metavar="N", default=32, show_default=True,
    help="The most settings tried for each backend and token count.",
)  # fmt: skip
@click.option(
    "--search-within", type=Number(1, 1e9), default=1.5, show_default=True, metavar="RATIO",
    help="Search settings of backends whose own setting takes at most this many times the fastest "
    "backend's.",
)  # fmt: skip
@click.option(
    "--budget", type=budget, metavar="TIME", show_default="as long as it takes",
    help="Wall time of the sweep, such as 120s or 5m: the best answers so far, and what was cut.",
)  # fmt: skip
@click.option(
    "--wait-quiet", type=duration, metavar="TIME",
    help="Wait up to this long before each timing for other work to leave the processors.",
)  # fmt: skip
@click.option(
    "--start-from", type=click.Path(dir_okay=False, exists=True), metavar="FILE",
    help="Tuned Triton file of vLLM or SGLang: settings that a search tries first.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(0, 2**31 - 1), metavar="N", default=0, show_default=True,
    help="Seed of activations, routing and search.",
)  # fmt: skip
@click.option(
    "--limit", type=Number(0, 3600, min_open=True), default=4.0, show_default=True,
    metavar="SECONDS", help="Wall time that timing one candidate at one token count may take.",
)  # fmt: skip
@click.option(
    "--step-limit", type=Number(0, 86400, min_open=True), default=600.0,
    show_default=True, metavar="SECONDS",
    help="Time that packing or the first call, compilation included, may take; verifying: thrice.",
)  # fmt: skip
@click.option(
    "--eager", is_flag=True,
    help="GPU: time calls as they are launched, not in CUDA graphs; stored apart.",
)  # fmt: skip
@require_option
@click.option("--fresh", is_flag=True, help="Measure again what the database already has.")
@click.option(
    "--retry-failed", is_flag=True,
    help="Try again what failed here before; otherwise it waits until something changes.",
)  # fmt: skip
@click.option(
    "--isolate/--no-isolate", default=True, show_default=True,
    help="Run candidates in a process of their own, where a crash or hang ends only that one.",
)  # fmt: skip
@cache_option
@device_option
@db_option
@click.pass_obj
def command(
    args: list[str],
    target: str,
    tokens: tuple[int, ...],
    layer_options: LayerOptions,
    routing: str,
    backends: tuple[str, ...],
    allow_a8: bool,
    trials: int,
    search_within: float,
    budget: Budget | None,
    wait_quiet: float | None,
    start_from: str | None,
    seed: int,
    limit: float,
    eager: bool,
    step_limit: float,
    require: tuple[str, ...],
    fresh: bool,
    retry_failed: bool,
    isolate: bool,
    cache: str,
    device: str | None,
    db: str | None,
) -> Report:
    """Pack, verify and time every backend that can run the layer; store it all and decide.

    Layers of a checkpoint that are alike are swept once, by the first of them that can be read; one
    that cannot does not stop the others, and the status is 1 then. Ctrl-C keeps what is measured;
    the same command goes on from there.
    """
    from autosel import registry
    from autosel.cli.progress import SweepProgress
    from autosel.cli.stand_ins import Failures
    from autosel.cli.target import check_routing, resolve
    from autosel.device import detect
    from autosel.engine_export import read_tuned
    from autosel.store import Store
    from autosel.timing import TimingSettings
    from autosel.tune_types import SweepSettings
    from autosel.worker_limits import StepLimits

    settings = SweepSettings(
        token_counts=tokens,
        routing=routing,
        timing=TimingSettings(
            cache="hot" if cache == "hot" else "cold",
            graph=not eager,
            limit_s=limit,
            wait_quiet_s=wait_quiet or 0.0,
        ),
        backends=tuple(registry.get(name).name for name in backends),
        allow_a8=allow_a8,
        trials=budget.trials if budget and budget.trials else trials,
        search_within=search_within,
        budget_s=budget.seconds if budget else None,
        seed=seed,
        start_from=start_from or "",
        require=require,
        resume=not fresh,
        retry_failed=retry_failed,
        isolate=isolate,
        limits=StepLimits(pack_s=step_limit, first_call_s=step_limit, verify_s=3 * step_limit),
    )
    for line in read_tuned(start_from).notes if start_from else ():
        note(line)
    found = resolve(target, layer_options, every=True)
    check_routing(routing, found)
    here = detect(device)
    failures = Failures(found)
    with Store.open(db) as store, SweepProgress() as progress:
        results, interrupted = _sweep(found, settings, here, store, progress, failures)
        plans = [
            _plan(found, result, len(layer.indices), settings, store) for layer, result in results
        ]
        place = str(store.path) if store.path else None
    again = shlex.join(["autosel", *(word for word in args if word != "--fresh")])
    _say_what_was_kept(progress, place, interrupted, again)
    return _report(found, here, results, plans, place, interrupted, failures)


def _sweep(
    target: Target,
    settings: SweepSettings,
    device: Device,
    store: Store,
    progress: SweepProgress,
    failures: Failures,
) -> tuple[Results, bool]:
    """One sweep for each kind of layer that can be read; whether Ctrl-C ended it."""
    from autosel.tune import sweep

    results: Results = []
    began = time.monotonic()
    try:
        for number, layer in enumerate(target.layers):
            progress.label = layer.label
            mine = settings
            if settings.budget_s is not None:
                left = settings.budget_s - (time.monotonic() - began)
                share = max(left / (len(target.layers) - number), _LEAST_BUDGET_S)
                mine = replace(settings, budget_s=share)
            run = partial(sweep, settings=mine, device=device, store=store, observer=progress)
            result = failures.work(layer, run)
            if result is not None:
                results.append((layer, result))
    except KeyboardInterrupt:
        return results, True
    return results, False


def _plan(
    target: Target, result: SweepResult, alike: int, settings: SweepSettings, store: Store
) -> Plan | None:
    """The layer's plan made anew with what was measured, and stored."""
    from autosel import planning, presets

    return planning.renew(
        store,
        result.problem,
        result.device,
        routing=result.routing,
        timing=(("cache", settings.timing.cache),),
        allow_a8=settings.allow_a8,
        require=settings.require,
        layers=alike or presets.find(target.name).num_moe_layers,
    )


def _say_what_was_kept(
    progress: SweepProgress, place: str | None, interrupted: bool, again: str
) -> None:
    counts = f"{progress.fresh} measured, {progress.resumed} taken from the database"
    where = f"kept in {place}" if place else "not kept: the database is in memory"
    note(f"{counts}; {where}")
    if interrupted and place:
        # Without --fresh, which would measure again what has just been kept.
        note(f"interrupted; the same command goes on from here: {again}")
    elif interrupted:
        note("interrupted; nothing can be resumed")


def _report(
    target: Target,
    device: Device,
    results: Results,
    plans: list[Plan | None],
    place: str | None,
    interrupted: bool,
    failures: Failures,
) -> Report:
    from autosel.cli.decisions import left_out_table, outcome_table, why_lines
    from autosel.cli.plans import copies_line, short_lines
    from autosel.records import decision_dict, measurement_dict
    from autosel.words import problem_text

    parts: list[Any] = []
    answers: list[dict[str, Any]] = []
    for (layer, result), plan in zip(results, plans, strict=True):
        title = f"{layer.label}: {problem_text(result.problem)}; {result.routing} routing"
        # The decisions come last, where the eye is when the command ends.
        parts += [left_out_table(result.outcomes), outcome_table(result.outcomes, title)]
        parts += why_lines(result.outcomes)
        if result.decisions:
            parts.append(copies_line(result.decisions, result.measurements))
        if plan is not None:
            parts += short_lines(plan)
        parts += [result.standing_text, result.unsearched_text, result.aside_text]
        parts += [cut.text for cut in result.cuts]
        answers.append(
            {
                "layer": layer.label,
                "layers": layer.indices,
                "problem": result.problem.to_dict(),
                "problem_key": result.problem.key,
                "routing": result.routing,
                "ceilings": asdict(result.ceilings) if result.ceilings else None,
                "decisions": [decision_dict(item) for item in result.decisions],
                "plan": None if plan is None else plan.to_dict(),
                "nothing_usable": [
                    {"bucket": asdict(item.bucket), "why": item.why}
                    for item in result.outcomes
                    if item not in result.decisions
                ],
                "standing": {
                    str(count): [item.key for item in found] for count, found in result.standing
                },
                "unsearched": {str(count): list(names) for count, names in result.unsearched},
                "aside": {str(count): list(words) for count, words in result.aside},
                "cut": [{**asdict(cut), "text": cut.text} for cut in result.cuts],
                "measurements": [measurement_dict(item) for item in result.measurements],
            }
        )
    data = {
        "target": target.name,
        "device": device.to_dict(),
        "database": place,
        "interrupted": interrupted,
        "failed": failures.to_list(),
        "answers": answers,
    }
    status = max(failures.say("swept"), 130 if interrupted else 0)
    if results and not interrupted and not any(result.decisions for _, result in results):
        names = {item.candidate.backend for _, r in results for item in r.rejected(1)}
        note(f"error: nothing usable here: none of {len(names)} backends may be chosen (see above)")
        status = 1
    return Report(data, [part for part in parts if part], status)
