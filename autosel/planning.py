"""Plans from the database: the measurements of a layer, the policy asked for, the plan kept.

A plan is made of stored measurements alone, so it can be asked "what if" without a device. The last
one stored for a layer holds, and its policy (workload, budget) is kept when new measurements come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from autosel import registry
from autosel.core import (
    Candidate,
    Device,
    Measurement,
    Plan,
    Problem,
    Reason,
    Workload,
)
from autosel.decide import Requirement, backends_only
from autosel.errors import AutoselError, NothingUsableError
from autosel.plans import plan as make_plan
from autosel.records import Timing, of_newest_mode
from autosel.requirements import Required
from autosel.store import Store
from autosel.tiers import COLD
from autosel.weight_budget import WeightBudget
from autosel.workload import DEFAULT, PRESETS


@dataclass(frozen=True, slots=True)
class Policy:
    """What a plan is made for; the default is one copy under mixed traffic.

    backends, exclude  names: only these, or none of these
    require            properties that candidates must be certified for
    """

    workload: Workload = PRESETS[DEFAULT]
    budget: WeightBudget = field(default_factory=WeightBudget)
    allow_a8: bool = False
    backends: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    require: tuple[str, ...] = ()

    @property
    def conditions(self) -> tuple[Requirement, ...]:
        only = (backends_only(self.backends),) if self.backends else ()
        return (*only, *map(_not, self.exclude))

    @property
    def words(self) -> tuple[str, ...]:
        """All conditions in words, as the plan keeps them."""
        words = [f"backend {' or '.join(self.backends)}"] if self.backends else []
        words += [f"not backend {name}" for name in self.exclude]
        words += ["8-bit activations allowed"] if self.allow_a8 else []
        return (*words, *(f"certified {name}" for name in self.require))


def _not(name: str) -> Requirement:
    return lambda m: Reason("backend", name, f"not {name}") if m.candidate.backend == name else None


def plan_layer(
    store: Store,
    problem: Problem,
    device: Device,
    policy: Policy | None = None,
    *,
    routing: str = "uniform",
    timing: Timing = COLD,
    layers: int = 1,
) -> Plan:
    """The plan for one kind of layer, from what is stored; nothing is written.

    Raises NothingUsableError when nothing is stored for this layer, device and routing, or nothing
    stored may be chosen or fits.
    """
    policy = policy or Policy()
    rows = measurements(store, problem, device, routing, timing)
    certified = Required.stored(policy.require, store, problem, device)
    return make_plan(
        rows,
        workload=policy.workload,
        budget=policy.budget,
        layers=layers,
        defaults=built_in(problem, device, rows),
        allow_a8=policy.allow_a8,
        require=(*policy.conditions, certified) if certified else policy.conditions,
        requirements=policy.words,
    )


def plan_model(
    store: Store,
    kinds: Sequence[tuple[Problem, int]],
    device: Device,
    policy: Policy | None = None,
    *,
    routing: str = "uniform",
    timing: Timing = COLD,
) -> list[Plan | AutoselError]:
    """A plan for each kind of layer of a model, ``(problem, layers of that kind)``; or why not.

    A budget in bytes is that of the whole model: each kind gets the part that its smallest copies
    are of all smallest copies.
    """
    policy = policy or Policy()
    budgets = [policy.budget] * len(kinds)
    if policy.budget.total_bytes is not None and len(kinds) > 1:
        sizes = [
            layers * smallest_copy(_stored(store, problem, device, routing, timing))
            for problem, layers in kinds
        ]
        whole = max(sum(sizes), 1)
        shares = [policy.budget.total_bytes * size // whole for size in sizes]
        budgets = [WeightBudget(None, max(share, 1)) for share in shares]
    found: list[Plan | AutoselError] = []
    for (problem, layers), budget in zip(kinds, budgets, strict=True):
        own = replace(policy, budget=budget)
        try:
            made = plan_layer(
                store, problem, device, own, routing=routing, timing=timing, layers=layers
            )
        except AutoselError as error:
            found.append(error)
        else:
            found.append(made)
    return found


def measurements(
    store: Store, problem: Problem, device: Device, routing: str, timing: Timing
) -> list[Measurement]:
    """What is stored of one layer; NothingUsableError when that is nothing."""
    rows = _stored(store, problem, device, routing, timing)
    if not rows:
        where = device.name.strip() or "an unnamed device"
        raise NothingUsableError(
            f"nothing is stored for {problem.key} on {where} with {routing} routing; "
            "a sweep measures it"
        )
    return rows


def unmeasured(
    store: Store, problem: Problem, device: Device, routing: str, timing: Timing = COLD
) -> bool:
    """Whether nothing is stored of a layer, so that only a sweep helps."""
    return not _stored(store, problem, device, routing, timing)


def _stored(
    store: Store, problem: Problem, device: Device, routing: str, timing: Timing
) -> list[Measurement]:
    if not device.name.strip():  # nothing stored is about a device without a name
        return []
    return of_newest_mode(store.measurements(problem, device, routing, timing=timing))


def smallest_copy(rows: Sequence[Measurement]) -> int:
    """Bytes of the smallest packed copy that ran; 0 where none did."""
    return min((m.weight_bytes for m in rows if m.status == "ok" and m.weight_bytes), default=0)


def built_in(problem: Problem, device: Device, rows: Sequence[Measurement]) -> set[Candidate]:
    """The measured backends' built-in settings, which are kept unless something is faster."""
    found: set[Candidate] = set()
    counts = {m.num_tokens for m in rows}
    for name in {m.candidate.backend for m in rows if m.status == "ok"}:
        try:
            backend = registry.get(name)
            for count in counts:
                params = backend.space(problem, count, device).default
                found.add(Candidate.of(name, params, backend.layout(problem, params).key))
        except AutoselError:  # of a package that is not here: it has no default to keep
            continue
    return found


def held(
    store: Store, problem: Problem, device: Device, routing: str, timing: Timing = COLD
) -> Plan | None:
    """The plan that holds for a layer: the last one stored; None where there is none."""
    if not device.name.strip():
        return None
    found = store.plans(problem, device, routing, timing=timing)
    return found[-1].plan if found else None


def keep(store: Store, plan: Plan) -> bool:
    """Store ``plan`` unless it holds already; whether it was added."""
    if held(store, plan.problem, plan.device, plan.routing, plan.timing) == plan:
        return False
    store.add_plan(plan)
    return True


def names(known: Collection[str]) -> tuple[str, ...]:
    """Backend names, checked; AutoselError with close names for one that there is not."""
    return tuple(registry.get(name).name for name in known)


def renew(
    store: Store,
    problem: Problem,
    device: Device,
    *,
    routing: str = "uniform",
    timing: Timing = COLD,
    allow_a8: bool = False,
    require: tuple[str, ...] = (),
    layers: int = 1,
) -> Plan | None:
    """Plan again after new measurements and store it; the workload and budget that held stay.

    None, and nothing stored, where there is nothing to plan with, or where the plan that holds has
    other conditions: they are the user's, who renews it.
    """
    before = held(store, problem, device, routing, timing)
    policy = Policy(allow_a8=allow_a8, require=require)
    if before is not None:
        layers = before.layers
        if before.requirements not in ((), policy.words):
            return None
        budget = WeightBudget.parse(before.budget)
        if budget.total_bytes is not None:  # that of a whole model, of which this is one kind
            budget = WeightBudget(None, before.budget_bytes * layers)
        policy = replace(policy, workload=before.workload, budget=budget)
    try:
        made = plan_layer(
            store, problem, device, policy, routing=routing, timing=timing, layers=layers
        )
    except AutoselError:
        return None
    keep(store, made)
    return made
