"""What a layer is built with, and the building: place, ranks, who serves it, packed weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypedDict, TypeVar

import torch

from autosel.core import CanonicalExperts, Device, Plan, Problem
from autosel.errors import AutoselError, CheckpointError, field_error
from autosel.identity import problem_differences
from autosel.layer_arguments import check_options
from autosel.layer_choice import Chooser, Layouts
from autosel.layer_place import expert_map_of, place, weights_id
from autosel.layer_prove import prover
from autosel.layer_refusals import refuse
from autosel.layer_runtime import LayerRuntime
from autosel.layer_surroundings import capturing, for_building
from autosel.ranks import Ranks
from autosel.ranks_choice import SharedChooser, exchange
from autosel.routing_spec import RouterSpec
from autosel.store import Database

Load = Callable[[torch.device], CanonicalExperts]
SharedExperts = Callable[[torch.Tensor], torch.Tensor]

#: The ranks that sum their outputs also decide together.
AUTO = "reduce_group"
#: What only the weights themselves tell for sure: a source's description may come from headers and
#: from the small tensors of expert 0.
_SEEN_LATE = ("w13.symmetric", "w2.symmetric", "w13.has_g_idx", "w2.has_g_idx", "has_bias")


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
    expert_map  integer ``[num_experts]``: local id of each expert or -1, in place of ``ep_rank``
                of ``ep_size``; from a checkpoint these experts are read. Left out, the ranks of
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


@contextmanager
def making(options: Mapping[str, object]) -> Iterator[None]:
    """What comes before :func:`build`. A fault in here reaches the ranks that make the layer at the
    same time, which would wait for this one; nothing of the caller's surroundings counts.
    """
    try:
        with for_building():
            check_options(options)
            yield
    except Exception as error:
        ranks = _ranks(options)
        if ranks is not None:
            exchange(ranks, None, error)
        raise


def build(
    load: Load, problem: Problem, given: LayerOptions, model: str | None = None
) -> tuple[LayerRuntime, str]:
    """The runtime of a layer whose weights ``load`` gives, and the id of these weights.

    Names among ``given`` that nobody knows are refused here. ``model`` is the checkpoint's folder,
    where there is one.
    """
    options: LayerOptions = {**DEFAULTS, **given}
    with making(options):
        others = {name: value for name, value in options.items() if name not in DEFAULTS}
        refuse("FusedMoE", others, tuple(DEFAULTS))
        where, described = place(options["device"])
        if capturing(where):  # before anything touches the stream
            found, wanted = "inside a graph capture", "before the capture"
            raise AutoselError(field_error("FusedMoE", "made", found, wanted))
        chosen = expert_map_of(
            problem, options["ep_rank"], options["ep_size"], options["expert_map"]
        )
    with for_building(where):
        on_device = None if chosen is None else chosen.to(where)
        ranks = _ranks(options)
        try:
            return _build(load, problem, options, model, where, described, on_device, ranks)
        except _OtherProblemError as other:
            return _build(load, other.problem, options, model, where, described, on_device, ranks)


class _OtherProblemError(CheckpointError):
    """The weights need more than their description says."""

    def __init__(self, problem: Problem, described: Problem) -> None:
        super().__init__(field_error("weights", "layer", problem.key, described.key))
        self.problem = problem


def _build(
    load: Load,
    problem: Problem,
    options: LayerOptions,
    model: str | None,
    where: torch.device,
    described: Device,
    expert_map: torch.Tensor | None,
    ranks: Ranks | None,
) -> tuple[LayerRuntime, str]:
    identity: list[str] = []

    def loader() -> CanonicalExperts:
        experts = load(where)
        if experts.problem != problem:
            late = {d.field for d in problem_differences(problem, experts.problem)}
            other = _OtherProblemError(experts.problem, problem)
            # Other ranks have been told the description; and sizes must never differ.
            raise CheckpointError(str(other)) if ranks or not late <= set(_SEEN_LATE) else other
        if not identity:
            identity.append(weights_id(experts))
        return experts

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
        prove=prover(loader, described, expert_map, leads=bool(ranks)) if check else None,
    )
    chooser: Chooser | SharedChooser = (
        make() if ranks is None else SharedChooser(ranks, make, problem, described)
    )
    return LayerRuntime(loader, chooser, where, expert_map, check=check), identity[0]


def _ranks(options: Mapping[str, object]) -> Ranks | None:
    """The ranks that decide together; None for a process that decides alone."""
    group = options.get("decide_group", AUTO)
    if group == AUTO:
        group = options.get("reduce_group")
    if group is None:
        return None
    ranks = Ranks(group)
    return ranks if ranks.size > 1 else None
