"""What is known about one layer on one device, gathered for plots, reports and comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from autosel import buckets, presets, samples
from autosel.core import Decision, Device, Measurement, Problem
from autosel.core.certificate import Certificate
from autosel.decide import NothingUsable, decide
from autosel.errors import AutoselError, field_error
from autosel.expert_map import local_range
from autosel.identity import hardware_differences, version_differences
from autosel.racing_bounds import PairedRatio
from autosel.rank_problem import rank_problem
from autosel.records import Timing, fits, newest_mode, of_newest_mode
from autosel.roofline import Ceilings, RooflinePoint, roofline
from autosel.routing_file import is_known
from autosel.routing_synthetic import make_routing
from autosel.safe_text import printable
from autosel.sources import MADE_UP
from autosel.stats import LogRatio
from autosel.store import Store, Sweep

#: The way of timing that stands for a model at work: other layers' weights fill the caches.
COLD: Mapping[str, Any] = {"cache": "cold"}


@dataclass(frozen=True)
class Evidence:
    """Measurements and decisions of one layer, device, routing and way of timing.

    label     what people call the layer
    ceilings  what the device can do at best, where a sweep measured it (the newest that did)
    seed      of the sweep's made-up routing, which says how many experts were hit
    newest    when the newest of it was stored (UTC, ISO 8601); empty where that is not known
    sweeps    the tuning runs that measured some of it, oldest first
    certificates  what was proven about the candidates, where that was kept
    command   what made it, where that was not `autosel sweep`
    swept     the `autosel sweep` that made it, with its options, where that is known
    target    the words that name the layer on a command line; empty where they are not known
    from_database  False for what a pack or an export holds, which no `--db` can name
    figures   for a published table, which has no samples: what its numbers are. Its times are
              drawn, and nothing is claimed about their noise.
    """

    label: str
    problem: Problem
    device: Device
    routing: str
    timing: Timing
    measurements: tuple[Measurement, ...]
    decisions: tuple[Decision, ...]
    ceilings: Ceilings | None = None
    seed: int = 0
    newest: str = ""
    sweeps: tuple[Sweep, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    figures: str = ""
    target: str = ""
    command: str = ""
    swept: str = ""
    from_database: bool = True

    @property
    def correct(self) -> tuple[Measurement, ...]:
        """Those that are right and timed."""
        return tuple(m for m in self.measurements if m.status == "ok" and m.times_us)

    @cached_property
    def token_counts(self) -> tuple[int, ...]:
        return tuple(sorted({m.num_tokens for m in self.measurements}))

    def at(self, num_tokens: int) -> tuple[Measurement, ...]:
        """Measurements of exactly this token count; the newest of a candidate counts."""
        found = {m.candidate: m for m in self.measurements if m.num_tokens == num_tokens}
        return tuple(found.values())

    @cached_property
    def outcomes(self) -> tuple[Decision | NothingUsable, ...]:
        """An answer for every token count: the stored decisions, and where one is missing (nothing
        could be chosen, or the sweep was stopped) what the measurements say."""
        found: list[Decision | NothingUsable] = list(self.decisions)
        covered = {d.bucket.measured for d in self.decisions}
        if self.token_counts:
            for bucket in buckets.buckets(self.token_counts):
                free = not any(bucket.measured in d.bucket for d in self.decisions)
                if bucket.measured not in covered and free:
                    found.append(decide(self.at(bucket.measured), bucket=bucket))
        return tuple(sorted(found, key=lambda item: item.bucket.low))

    def outcome(self, num_tokens: int) -> Decision | NothingUsable | None:
        """The answer for a call of ``num_tokens`` tokens; None where nothing was measured."""
        return next((o for o in self.outcomes if num_tokens in o.bucket), None)

    def bound(self, num_tokens: int) -> RooflinePoint | None:
        """The least time a call can take; None where ceilings or recorded routing are not here."""
        if self.ceilings is None or not is_known(self.routing):
            return None
        hit, slots = experts_hit(self.problem, self.routing, num_tokens, self.seed)
        return roofline(self.problem, num_tokens, self.ceilings, experts_hit=hit, slots=slots)


def ratio(slow: Measurement, fast: Measurement) -> LogRatio | PairedRatio:
    """``slow / fast`` as decisions compare them: round by round where they raced each other."""
    paired = samples.paired(slow, fast)
    return paired or samples.estimate(slow).over(samples.estimate(fast))


def gather(
    store: Store,
    problem: Problem,
    device: Device,
    *,
    routing: str = "uniform",
    timing: Mapping[str, Any] | None = None,
    label: str = "",
) -> Evidence:
    """What ``store`` holds about exactly this; without measurements where it holds nothing.

    ``timing`` picks a way of timing (default: cold caches).
    """
    mode = tuple(sorted((timing or COLD).items()))
    measurements = of_newest_mode(store.measurements(problem, device, routing, timing=mode))
    newest = newest_mode(measurements)
    decisions = [
        stored.decision
        for stored in store.stored_decisions(problem, device, routing, timing=mode)
        if fits(stored.mode, newest)
    ]
    nearest = store.nearest(problem, device, routing)
    everywhere = [sweep for sweep in store.sweeps() if sweep.device == device]
    sweeps = tuple(
        sweep for sweep in everywhere
        if store.measurements(problem, device, routing, sweep_id=sweep.id, history=True)
    )  # fmt: skip
    found = _newest_with_ceilings(sweeps or everywhere, problem.act_dtype)
    return Evidence(
        label=printable(label or label_of(problem)),
        problem=problem,
        device=device,
        routing=routing,
        timing=mode,
        measurements=tuple(measurements),
        decisions=tuple(decisions),
        ceilings=found[1] if found else None,
        seed=int(found[0].settings.get("seed", 0)) if found else 0,
        newest=nearest.entry.newest if nearest and nearest.exact else "",
        sweeps=sweeps,
        certificates=tuple(store.certificates(problem, device)),
    )


def gather_all(
    store: Store,
    devices: Iterable[Device] | None = None,
    *,
    routing: str | None = None,
    timing: Mapping[str, Any] | None = None,
) -> list[Evidence]:
    """Every layer that was measured on ``devices`` (all of them when None), in stored order."""
    wanted = None if devices is None else list(devices)
    found = []
    for entry in store.entries():
        if (wanted is None or entry.device in wanted) and routing in (None, entry.routing):
            one = gather(store, entry.problem, entry.device, routing=entry.routing, timing=timing)
            # Rows of candidates that were never timed belong to every way of timing.
            timed = any(m.status == "ok" for m in one.measurements) or bool(one.decisions)
            key = (entry.problem, entry.device, entry.routing)
            if timed or (
                one.measurements and all(m.status != "ok" for m in store.measurements(*key))
            ):
                labels = [sweep.label for sweep in one.sweeps]
                told = [label for label in labels if label and not label.startswith(MADE_UP)]
                label = preset_label(one.problem) or (told[-1] if told else one.label)
                target = preset_target(one.problem)
                found.append(replace(one, label=printable(label), target=target))
    return found


def devices_named(store: Store, part: str) -> list[Device]:
    """Stored devices whose name contains ``part``, whatever its case; AutoselError, with the names
    there are, when none does."""
    known = list(dict.fromkeys(entry.device for entry in store.entries()))
    found = [device for device in known if part.lower() in device.name.lower()]
    if not found:
        names = ", ".join(sorted({repr(device.name) for device in known})) or "an empty database"
        raise AutoselError(field_error("device", "stored name", repr(part), f"part of {names}"))
    return found


def nothing_on(store: Store, devices: Iterable[Device]) -> AutoselError:
    """Why nothing was found on ``devices``: what the database has instead."""
    known = list(dict.fromkeys(entry.device for entry in store.entries()))
    stale = [
        f"only {device.name} with other software ({'; '.join(map(str, changed))})"
        for device in known
        for here in devices
        if (changed := version_differences(here, device)) and not hardware_differences(here, device)
    ]
    names = sorted({device.name for device in known})
    other = f"only {', '.join(names)}" if names else "an empty database"
    found = stale[-1] if stale else other
    expected = "a sweep first" + (", or --stored-device with part of a name" if names else "")
    return AutoselError(field_error("database", "layers measured on this device", found, expected))


def label_of(problem: Problem) -> str:
    """``qwen3-30b-a3b TP4``: the preset that has these sizes, else the sizes themselves."""
    sizes = (
        f"{problem.num_experts} experts top-{problem.top_k}, "
        f"{problem.hidden_size}x{problem.intermediate_size}"
    )
    return preset_label(problem) or " ".join([sizes, *(_scheme(problem) or ["int4 g128"])])


def preset_label(problem: Problem) -> str:
    """The preset that has these sizes and what is unusual about it; empty when there is none."""
    return _preset_words(problem)[0]


def preset_target(problem: Problem) -> str:
    """The words that name the layer on a command line; empty where no preset has its sizes."""
    return _preset_words(problem)[1]


def _preset_words(problem: Problem) -> tuple[str, str]:
    """The label of :func:`preset_label`, and the words that name it on a command line."""
    for preset in presets.presets():
        same = (
            preset.hidden_size == problem.hidden_size
            and preset.activation == problem.activation
            and preset.has_bias == problem.has_bias
            and preset.router_weight_on_input == problem.router_weight_on_input
            and problem.num_experts <= preset.num_experts
            and problem.top_k == min(preset.top_k, problem.num_experts)
            and preset.intermediate_size % problem.intermediate_size == 0
        )
        if not same:
            continue
        words = [preset.name]
        ranks = preset.intermediate_size // problem.intermediate_size
        whole = replace(
            problem,
            num_local_experts=problem.num_experts,
            intermediate_size=preset.intermediate_size,
            w2=problem.w13,
        )
        if rank_problem(whole, tp_size=ranks).w2 != problem.w2:
            continue
        words += [f"TP{ranks}"] if ranks > 1 else []
        if problem.num_local_experts != problem.num_experts:
            words.append(f"EP{problem.num_experts // problem.num_local_experts}")
        if problem.num_experts != preset.num_experts:
            words.append(f"{problem.num_experts} experts")
        return " ".join([*words, *_scheme(problem)]), _command(preset.name, problem, ranks)
    return "", ""


def _command(name: str, problem: Problem, ranks: int) -> str:
    """``qwen3-30b-a3b --tp 4``; empty where the options do not make exactly this layer."""
    one, words = problem.w13, [name]
    options: dict[str, Any] = {}
    for option, attribute, value, usual in (
        ("--bits", "num_bits", one.num_bits, 4),
        ("--group-size", "group_size", one.group_size, 128),
        ("--experts", "experts", problem.num_experts, presets.find(name).num_experts),
        ("--tp", "tp", ranks, 1),
        ("--act-dtype", "act_dtype", problem.act_dtype, "bfloat16"),
    ):
        if value != usual:
            options[attribute] = value
            words += [option, "channel" if (attribute, value) == ("group_size", -1) else str(value)]
    for option, attribute, value in (
        ("--asym", "symmetric", one.symmetric),
        ("--act-order", "has_g_idx", not one.has_g_idx),
    ):
        if not value:
            options[attribute] = attribute == "has_g_idx"
            words.append(option)
    return " ".join(words) if presets.get(name, **options) == problem else ""


def _scheme(problem: Problem) -> list[str]:
    """Words for a quantisation that is not the usual one: int4, groups of 128, symmetric, bf16."""
    one = problem.w13
    group = "channel" if one.group_size == -1 else f"g{one.group_size}"
    words = [] if (one.num_bits, one.group_size) == (4, 128) else [f"int{one.num_bits}", group]
    words += [] if one.symmetric else ["asym"]
    words += ["act-order"] if one.has_g_idx else []
    return words + ([] if problem.act_dtype == "bfloat16" else [problem.act_dtype])


def experts_hit(problem: Problem, routing: str, num_tokens: int, seed: int) -> tuple[int, int]:
    """Local experts that the made-up routing of a sweep really hit, and slots they serve."""
    ids = make_routing(routing, num_tokens, problem, seed=seed).topk_ids.numpy()  # [M, top_k]
    held = local_range(problem, 0)
    here = ids[(ids >= held.start) & (ids < held.stop)]
    return len(np.unique(here)), here.size


def _newest_with_ceilings(sweeps: Sequence[Sweep], act_dtype: str) -> tuple[Sweep, Ceilings] | None:
    for sweep in reversed(sweeps):
        if sweep.ceilings:
            known = sweep.ceilings.get(act_dtype, sweep.ceilings)
            if isinstance(known, Mapping) and {"read_gbps", "matmul_tflops"} <= set(known):
                return sweep, Ceilings(float(known["read_gbps"]), float(known["matmul_tflops"]))
    return None
