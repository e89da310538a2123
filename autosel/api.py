"""The Python API: the main job in a few lines, the same that the command line does.

>>> import autosel
>>> result = autosel.sweep("path/to/checkpoint")   # or a preset: "qwen3-30b-a3b"
>>> result.decision(tokens=16).winner.key
>>> autosel.explain("path/to/checkpoint", tokens=16).why
>>> autosel.plan("path/to/checkpoint", weight_budget="1.0x").resident
>>> autosel.plot("path/to/checkpoint", "latency.png")
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosel import presets, sources
from autosel.api_arguments import Where, device_of, token_count, token_counts
from autosel.checkpoint import Checkpoint
from autosel.core import Plan, Problem, Workload
from autosel.errors import AutoselError, CheckpointError, ConfigError, field_error
from autosel.explanation import Explanation
from autosel.explanation import explain as _explain
from autosel.ranks import Ranks
from autosel.ranks_sweep import sweep_together
from autosel.sources import CheckpointSource, RandomSource, WeightSource
from autosel.store import Database, opened_database
from autosel.tiers import open_tiers
from autosel.tune import sweep as _sweep
from autosel.tune_types import Observer, SweepResult, SweepSettings

if TYPE_CHECKING:  # it brings pandas
    from autosel.evidence import Evidence

Target = str | Path | WeightSource


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model folder: its layers, their formats, the accounting of its expert tensors.

    Reads configs and headers, no weights. Raises ConfigError or CheckpointError in one line.
    """
    return Checkpoint.open(path)


def source(target: Target, *, layer: int | None = None, **options: Any) -> WeightSource:
    """Where weights come from: a checkpoint folder, else a preset with made-up weights.

    layer    number of a checkpoint's MoE layer; its first quantised one when left out
    options  checkpoint: ``tp_rank, tp_size, ep_rank, ep_size, act_dtype``; preset: those of
             :func:`autosel.presets.get`, and ``seed`` of the weights

    Raises AutoselError when ``target`` is neither, or has no such layer.
    """
    if not isinstance(target, str | Path):
        if not hasattr(target, "problem") or not hasattr(target, "load"):
            wanted = "a checkpoint folder, the name of a preset or a WeightSource"
            raise AutoselError(field_error("source", "target", ascii(target)[:80], wanted))
        return target
    if Path(target).is_dir():
        chosen = _first_layer(target) if layer is None else layer
        made: WeightSource = CheckpointSource(str(target), chosen, **options)
    else:
        if isinstance(target, Path) or layer is not None:
            raise CheckpointError(field_error(str(target), "checkpoint", "nothing", "a folder"))
        seed = options.pop("seed", 0)
        try:
            made = RandomSource(presets.get(target, **options), seed)
        except ConfigError as error:
            raise ConfigError(f"{target!r} is no checkpoint folder; {error}") from None
    return made


def sweep(
    target: Target,
    *,
    tokens: int | Iterable[int] = (),
    routing: str = "uniform",
    backends: Sequence[str] = (),
    allow_a8: bool = False,
    require: Sequence[str] = (),
    layer: int | None = None,
    device: Where = None,
    db: Database = None,
    observer: Observer | None = None,
    settings: SweepSettings | None = None,
    ranks: Ranks | None = None,
    **options: Any,
) -> SweepResult:
    """Pack, verify and time every backend that can run the layer here; store it all and decide.

    tokens    token counts to measure, or one; the device kind's default when left out
    require   properties that winners must be certified for (:data:`autosel.core.PROPERTIES`)
    db        database file or open Store (default: the user's; see :meth:`Store.open`)
    settings  everything else there is to choose; the arguments above override it
    ranks     of a torch.distributed group (:class:`autosel.ranks.Ranks`), all of which call this:
              the first one tunes, and every rank gets the decisions that all of them can run
    options   of :func:`source`

    Interrupted, it goes on where it stopped when called again.
    """
    chosen = settings or SweepSettings()
    given: dict[str, Any] = {}
    if counts := token_counts(tokens):
        given["token_counts"] = counts
    if backends:
        given["backends"] = tuple(backends)
    if routing != "uniform":
        given["routing"] = routing
    if allow_a8:
        given["allow_a8"] = True
    if require:
        given["require"] = tuple(require)
    chosen = replace(chosen, **given)
    weights = source(target, layer=layer, **options)
    where = None if device is None else device_of(device)
    if ranks is not None:
        # Only the leader's database counts; another rank's may be anything.
        with opened_database(db if ranks.is_leader else ":memory:") as store:
            return sweep_together(
                weights, chosen, ranks=ranks, device=where, store=store, observer=observer
            )
    with opened_database(db) as store:
        return _sweep(weights, chosen, device=where, store=store, observer=observer)


def explain(
    target: Target,
    tokens: int,
    *,
    routing: str = "uniform",
    require: Sequence[str] = (),
    layer: int | None = None,
    device: Where = None,
    db: Database = None,
    **options: Any,
) -> Explanation:
    """Why a backend is used for ``tokens`` tokens, or why nothing is; from what is stored alone.

    Asks the database, then packs (:mod:`autosel.tiers`): installed ones, the one beside the model,
    those that ship with autosel.
    """
    count = token_count(tokens)
    weights = source(target, layer=layer, **options)
    model = weights.path if isinstance(weights, CheckpointSource) else None
    with open_tiers(db, model) as tiers:
        return _explain(
            tiers, weights.problem, device_of(device), count, routing=routing, require=require
        )


def plan(
    target: Target,
    *,
    weight_budget: str = "1.0x",
    histogram: str | Path | Workload = "mixed",
    routing: str = "uniform",
    backends: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_a8: bool = False,
    require: Sequence[str] = (),
    layers: int | None = None,
    layer: int | None = None,
    device: Where = None,
    db: Database = None,
    keep: bool = True,
    **options: Any,
) -> Plan:
    """Which packed copies of one layer's weights stay resident, and what each token range runs.

    weight_budget  ``1.0x`` (one copy), ``1.5x``, or bytes for all ``layers``: ``12GiB``
    histogram      calls by tokens: a preset's name, a file, or a Workload
    backends       only these; ``exclude``: none of these
    require        properties that candidates must be certified for
    layers         alike layers of the model; those of the checkpoint when left out
    keep           store the plan: the layer and packs then use it

    From the database alone. Raises NothingUsableError where nothing is stored, or nothing fits.
    """
    from autosel import planning
    from autosel.weight_budget import WeightBudget
    from autosel.workload import load

    policy = planning.Policy(
        workload=load(histogram),
        budget=WeightBudget.parse(weight_budget),
        allow_a8=allow_a8,
        backends=planning.names(backends),
        exclude=planning.names(exclude),
        require=tuple(require),
    )
    weights = source(target, layer=layer, **options)
    with opened_database(db) as store:
        made = planning.plan_layer(
            store,
            weights.problem,
            device_of(device),
            policy,
            routing=routing,
            layers=layers or _alike(target, weights.problem),
        )
        if keep:
            planning.keep(store, made)
    return made


def pack(
    target: str | Path,
    path: str | Path = "autosel-pack.json",
    *,
    samples: bool = False,
    allow_a8: bool = False,
    sign: str | Path | None = None,
    device: Where = None,
    db: Database = None,
    **options: Any,
) -> Path:
    """Write what is decided for a model as a decision pack; returns the file.

    samples   keep raw samples, so that readers can decide again
    allow_a8  may winners quantise activations to 8 bits
    sign      private Ed25519 key (PEM file) to sign with
    device    whose results (default: this machine's)
    options   checkpoint: ``tp_size``, ``act_dtype``; preset: those of :func:`autosel.presets.get`

    Raises PackError when nothing is decided for any of the layers.
    """
    from autosel.packs import content, models, signing
    from autosel.packs.build import build

    if Path(target).is_dir():
        about = models.of_checkpoint(target, **options)
    else:
        about = models.of_preset(str(target), presets.get(str(target), **options))
    with opened_database(db) as store:
        made = build(
            store,
            about,
            device=device_of(device),
            allow_a8=allow_a8,
            with_samples=samples,
            command=f"autosel.pack({about.name!r})",
        )
    content.write(made if sign is None else signing.sign(made, sign), path)
    return Path(path)


def plot(
    target: Target,
    path: str | Path,
    *,
    kind: str = "latency",
    routing: str = "uniform",
    layer: int | None = None,
    device: Where = None,
    db: Database = None,
    baseline: str | None = None,
    tokens: int | None = None,
    **options: Any,
) -> Path:
    """Draw what is stored about one layer as PNG or SVG by suffix, or its table as CSV.

    kind      of figure (:func:`autosel.plots.names`): latency against tokens by default
    baseline  for ``speedup``: backend to compare with; vLLM's choice when left out
    tokens    for ``bytes`` and ``noise``: a measured token count; the one nearest to 16

    From the database alone; needs no display. Returns the file. Raises AutoselError when nothing
    is stored.
    """
    from autosel import figures, plot_style, plots  # matplotlib and pandas when asked for

    target_path = plot_style.check_path(path)
    one = _measured(source(target, layer=layer, **options), device, routing, db)
    chosen = plots.Options(
        baseline=baseline, num_tokens=None if tokens is None else token_count(tokens)
    )
    return figures.write(kind, [one], target_path, chosen)


def report(
    target: Target,
    path: str | Path,
    *,
    tokens: int = 16,
    routing: str = "uniform",
    layer: int | None = None,
    device: Where = None,
    db: Database = None,
    **options: Any,
) -> Path:
    """Write one self-contained HTML file about one layer; ``tokens`` is what its summary is about.

    From the database alone. Returns the file. Raises AutoselError when nothing is stored.
    """
    from autosel import report_page

    count = token_count(tokens)
    one = _measured(source(target, layer=layer, **options), device, routing, db)
    place = str(db) if isinstance(db, str | Path) else ""
    return report_page.write_report([one], path, batch=count, place=place)


def _measured(weights: WeightSource, device: Where, routing: str, db: Database) -> Evidence:
    """What is stored about one layer; AutoselError where nothing of it was right."""
    from autosel import evidence, figures

    with opened_database(db) as store:
        one = evidence.gather(
            store, weights.problem, device_of(device), routing=routing, label=weights.label
        )
        if not one.correct:
            raise figures.nothing_here(store, one)
    return one


def _alike(target: Target, problem: Problem) -> int:
    """Layers of a checkpoint with the sizes of ``problem``, whole or split; 1 where unknown."""
    if not isinstance(target, str | Path) or not Path(target).is_dir():
        return 1
    scheme = (problem.w13, problem.w2, problem.num_experts, problem.hidden_size)
    opened = sources.open_checkpoint(str(target))  # what is known of it is kept there
    found = [opened.exact_problem(x.index) for x in opened.layers if x.status == "quantized"]
    found = [x for x in found if (x.w13, x.w2, x.num_experts, x.hidden_size) == scheme]
    return max(len(found), 1)


def _first_layer(path: str | Path) -> int:
    layers = Checkpoint.open(path).layers
    for layer in layers:
        if layer.status == "quantized":
            return layer.index
    found = "; ".join(f"layer {x.index} {x.status}: {x.reason}" for x in layers[:3])
    raise CheckpointError(
        field_error(str(path), "quantised MoE layers", found or "no MoE layer", "at least one")
    )
