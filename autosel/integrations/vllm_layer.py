"""Decides for one vLLM layer whether autosel runs it, and makes autosel's layer where it does.

Nothing of vLLM is imported: its objects are handed in. Every reason for a no is one line, and a no
leaves vLLM's layer as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from autosel.core import CanonicalExperts, Device, Problem
from autosel.errors import AutoselError
from autosel.explanation import explain
from autosel.integrations.vllm_options import Options
from autosel.integrations.vllm_reasons import why_not
from autosel.integrations.vllm_weights import Part, find_part, loaded_experts
from autosel.layer import FusedMoE
from autosel.layer_build import LayerOptions, build
from autosel.layer_choice import Chooser
from autosel.layer_place import place
from autosel.tiers import open_tiers

#: A child of vLLM's own logger, so that its lines appear among vLLM's.
logger = logging.getLogger("vllm.autosel")

T = TypeVar("T")
_said: set[str] = set()


@dataclass(frozen=True, slots=True)
class Engine:
    """What of the engine's configuration matters here, and how its ranks agree.

    folder         gives the checkpoint's folder; AutoselError where it is not on disk
    capture_sizes  token counts of the CUDA graphs that will be captured
    agree          called by all ranks with one text each; True where all said the same, and
                   something
    """

    options: Options
    folder: Callable[[], Path]
    capture_sizes: tuple[int, ...] = ()
    agree: Callable[[str], bool] = bool


def take_over(layer: Any, method: Any, engine: Engine) -> FusedMoE | str:
    """Autosel's layer in place of ``method``, or the reason why vLLM keeps its own.

    layer   vLLM's ``RoutedExperts`` after loading, its parameters still in the checkpoint's format
    method  its quantisation method

    Ranks agree twice: before anything is packed and when all are ready. Each decides from what is
    stored, so they differ only where their files, packages or devices do.
    """
    prepared = _tried(lambda: _prepare(layer, method, engine))
    if not engine.agree("" if isinstance(prepared, str) else "ready"):
        return prepared if isinstance(prepared, str) else "another rank leaves it to vLLM"
    made = _tried(prepared.make) if not isinstance(prepared, str) else prepared
    if not engine.agree("" if isinstance(made, str) else table(made)):
        return made if isinstance(made, str) else "another rank would run it in another way"
    return made


def table(layer: FusedMoE) -> str:
    """What serves which token counts, in words."""
    return "; ".join(f"{c.bucket.label} tokens {c.candidate.key}" for c in layer.choices)


def say(text: str, reason: str, level: int = logging.INFO) -> None:
    """One line for each reason; layers that are alike would repeat it."""
    if reason in _said:
        logger.debug("autosel: %s%s", text, reason)
        return
    _said.add(reason)
    logger.log(level, "autosel: %s%s", text, reason)


@dataclass(frozen=True, slots=True, eq=False)
class _Prepared:
    """A layer that may be taken over: its weights are proven and its decisions are there."""

    name: str
    part: Part
    weights: _Weights
    device: torch.device
    folder: Path
    engine: Engine

    def make(self) -> FusedMoE:
        """Pack, prove each candidate, and run once with each size that will be captured.

        Where none will, with one size of each bucket.
        """
        options: LayerOptions = {
            "device": self.device,
            "db": self.engine.options.db,
            "allow_a8": self.engine.options.allow_a8,
            "routing": self.engine.options.routing,
            "require": self.engine.options.require,
            "decide_group": None,
        }
        if self.part.expert_map is not None:
            options["expert_map"] = self.part.expert_map
        try:
            runtime, identity = build(self.weights, self.part.problem, options, str(self.folder))
        finally:
            self.weights.release()
        layer = FusedMoE(runtime, label=self.name, identity=identity)
        for choice in layer.choices:
            if not choice.tuned:
                raise AutoselError(
                    f"nothing decided for {choice.bucket.label} tokens: {choice.why}"
                )
        if self.device.type != "cpu":
            layer.warm_up(*self.engine.capture_sizes)
        return layer


def _prepare(layer: Any, method: Any, engine: Engine) -> _Prepared:
    """Everything that can be known before weights are packed; AutoselError says why not."""
    reason = why_not(layer, method)
    if reason:
        raise AutoselError(reason)
    folder = engine.folder()
    part = find_part(layer, method, folder)
    device, described = place(next(iter(layer.parameters())).device)
    _require_decided(part.problem, described, folder, engine.options)
    experts = loaded_experts(layer, method, part.problem)
    part.require_same(experts)
    return _Prepared(layer.layer_name, part, _Weights(experts, part), device, folder, engine)


class _Weights:
    """vLLM's weights while the layer is made; later, should a candidate fail, the files'."""

    def __init__(self, experts: CanonicalExperts, part: Part) -> None:
        self._held: CanonicalExperts | None = experts
        self._part = part

    def __call__(self, where: torch.device) -> CanonicalExperts:
        return self._part.read(where) if self._held is None else self._held.to(where)

    def release(self) -> None:
        self._held = None


def _require_decided(problem: Problem, device: Device, folder: Path, options: Options) -> None:
    """AutoselError where not every token count would be served by something that was decided.

    A default of autosel's layer is no decision: vLLM's own choice is the better guess then.
    """
    chooser = Chooser(
        problem,
        device,
        options.db,
        routing=options.routing,
        allow_a8=options.allow_a8,
        model=folder,
        require=options.require,
    )
    gap = next((choice.bucket for choice in chooser.table() if not choice.tuned), None)
    if gap is None:
        return
    routing = options.routing
    with open_tiers(options.db, folder) as tiers:
        asked = tiers.answers(problem, device, routing=routing, allow_a8=options.allow_a8)
        if asked.unproven and not _several_ranks():
            return  # a pack that is checked while the layer is made
        why = explain(tiers, problem, device, gap.low, routing=routing, require=options.require).why
    raise AutoselError(f"no decision for {gap.label} tokens of {problem.key}: {_short(why)}")


def _short(why: str, limit: int = 400) -> str:
    """The nearest stored entry may differ in thirty fields; a log line names the first ones."""
    if len(why) <= limit:
        return why
    end = why.rfind("; ", 0, limit)
    return why[: end if end > 0 else limit] + "; and more (autosel explain shows all)"


def _several_ranks() -> bool:
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _tried(work: Callable[[], T]) -> T | str:
    """What ``work`` gives, or in one line why it failed: no failure here may stop the server."""
    try:
        return work()
    except AutoselError as error:
        return " ".join(str(error).split())
    except Exception as error:
        logger.debug("autosel: unexpected", exc_info=True)
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
