"""What a layer is built with, and the building: place, ranks, who serves it, packed weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch

from autosel.core import CanonicalExperts, Plan, Problem
from autosel.layer_choice import Chooser, Layouts
from autosel.layer_place import expert_map_of, place, weights_id
from autosel.layer_prove import prover
from autosel.layer_refusals import refuse
from autosel.layer_runtime import LayerRuntime
from autosel.ranks import Ranks
from autosel.ranks_choice import SharedChooser, exchange
from autosel.routing_spec import RouterSpec
from autosel.store import Database

Load = Callable[[torch.device], CanonicalExperts]
SharedExperts = Callable[[torch.Tensor], torch.Tensor]

#: The ranks that sum their outputs also decide together.
AUTO = "reduce_group"


class LayerOptions(TypedDict, total=False):
    """Keywords of every way to build a :class:`autosel.FusedMoE`; none has to be given.

    ep_rank, ep_size  this rank of expert parallelism, and how many there are
    device      where the weights are packed and the layer runs
    db          database file or open Store with decisions; the user's when left out
    allow_a8    may a decision whose winner quantises activations to 8 bits be used
    require     properties (:data:`autosel.core.PROPERTIES`) that whoever serves must be certified
                for; NothingUsableError where nobody is
    layouts     ``one`` keeps the packed copies of the layer's plan; without a plan one copy, that
                which loses least time under mixed traffic. ``all`` keeps that of each bucket's
                winner
    plan        counts before the plan in the database (``autosel plan``) or pack
    routing     kind of routing of the decisions to look up
    check       run each candidate once and compare with the reference before it is used
    expert_map  integer ``[num_experts]``: local id of each expert or -1; left out, the ranks of
                expert parallelism hold equal runs of experts, the first ones one more
    decide_group  process group whose ranks hold parts of this layer and make it at the same time:
                its first rank decides for all of them. Left out, it is ``reduce_group``; None lets
                this process decide alone
    router, correction_bias  for :meth:`autosel.FusedMoE.apply_monolithic`
    shared_experts  called with ``x``; its output is added to the routed experts'
    reduce_group    a torch.distributed process group: outputs of its ranks are summed in place
                before the shared experts are added
    """

    ep_rank: int
    ep_size: int
    device: str | torch.device
    db: Database
    allow_a8: bool
    require: Sequence[str]
    layouts: Layouts
    plan: Plan | None
    routing: str
    check: bool
    expert_map: torch.Tensor | None
    decide_group: Any
    router: RouterSpec | None
    correction_bias: torch.Tensor | None
    shared_experts: SharedExperts | None
    reduce_group: Any


DEFAULTS: LayerOptions = {
    "ep_rank": 0,
    "ep_size": 1,
    "device": "cpu",
    "db": None,
    "allow_a8": False,
    "require": (),
    "layouts": "one",
    "plan": None,
    "routing": "uniform",
    "check": True,
    "expert_map": None,
    "decide_group": AUTO,
    "router": None,
    "correction_bias": None,
    "shared_experts": None,
    "reduce_group": None,
}

Function = TypeVar("Function", bound=Callable[..., Any])


def spelled_out(function: Function) -> Function:
    """Lets ``help`` and notebooks, which know nothing of Unpack, show the options one by one."""
    own = inspect.signature(function)
    *named, others = own.parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in DEFAULTS.items()
    ]
    shown = own.replace(parameters=[*named, *options, others.replace(annotation=Any)])
    function.__signature__ = shown  # type: ignore[attr-defined]
    return function


def build(
    load: Load, problem: Problem, options: LayerOptions, model: str | None = None
) -> tuple[LayerRuntime, str]:
    """The runtime of a layer whose weights ``load`` gives, and the id of these weights.

    ``options`` are complete; names among them that nobody knows are refused here, where the other
    ranks hear of it. ``model`` is the checkpoint's folder, where there is one.
    """
    ranks = _ranks(options["decide_group"], options["reduce_group"])
    try:
        others = {name: value for name, value in options.items() if name not in DEFAULTS}
        refuse("FusedMoE", others, tuple(DEFAULTS))
        where, described = place(options["device"])
        chosen = expert_map_of(
            problem, options["ep_rank"], options["ep_size"], options["expert_map"]
        )
    except Exception as error:
        if ranks is not None:
            exchange(ranks, None, error)  # the other ranks wait for this one
        raise
    identity: list[str] = []

    def loader() -> CanonicalExperts:
        experts = load(where)
        if not identity:
            identity.append(weights_id(experts))
        return experts

    on_device = None if chosen is None else chosen.to(where)
    check = options["check"]
    make = partial(
        Chooser,
        problem,
        described,
        options["db"],
        routing=options["routing"],
        allow_a8=options["allow_a8"],
        layouts=options["layouts"],
        plan=options["plan"],
        model=model,
        require=options["require"],
        prove=prover(loader, described, on_device, leads=bool(ranks)) if check else None,
    )
    chooser: Chooser | SharedChooser = (
        make() if ranks is None else SharedChooser(ranks, make, problem, described)
    )
    runtime = LayerRuntime(loader, chooser, where, on_device, check=check)
    return runtime, identity[0]


def _ranks(decide_group: Any, reduce_group: Any) -> Ranks | None:
    """The ranks that decide together; None for a process that decides alone."""
    group = reduce_group if decide_group == AUTO else decide_group
    if group is None:
        return None
    ranks = Ranks(group)
    return ranks if ranks.size > 1 else None
