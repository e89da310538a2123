"""FusedMoE: the module a model uses in place of its routed experts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from autosel import layer_op
from autosel.canonical import check_experts
from autosel.core import CanonicalExperts, Problem
from autosel.dispatch import check_strided, check_writable
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, RoutingError, field_error
from autosel.layer_arguments import (
    check_options,
    check_out,
    check_tensors,
    check_token_counts,
    shared_rows,
)
from autosel.layer_build import (
    DEFAULTS,
    LayerOptions,
    Load,
    SharedExperts,
    build,
    making,
    spelled_out,
)
from autosel.layer_choice import Choice
from autosel.layer_place import check_held, held_experts
from autosel.layer_refusals import refuse
from autosel.layer_runtime import LayerRuntime
from autosel.layer_state import PackedModule
from autosel.layer_surroundings import seen_by_torch
from autosel.routing import route
from autosel.routing_spec import RouterSpec
from autosel.sources import CheckpointSource, WeightSource

__all__ = ["FusedMoE"]


class FusedMoE(PackedModule):
    """One quantised MoE layer, run by the candidate that was decided for each token count.

    Build it with :meth:`from_checkpoint` (or :meth:`from_source`, :meth:`from_experts`). Calls are
    for inference: a backward pass is refused. They may come from several threads.

    The packed weights belong to this machine and device. ``state_dict`` therefore holds one small
    entry, by which loading it elsewhere checks that it is about the same weights; moving the
    module to another device or dtype is refused, and so is copying or pickling it.
    """

    correction_bias: torch.Tensor | None
    #: vLLM's word for replicas of busy experts: each expert is held once here.
    supports_eplb = False

    def __init__(
        self,
        runtime: LayerRuntime,
        *,
        label: str = "",
        identity: str = "",
        router: RouterSpec | None = None,
        correction_bias: torch.Tensor | None = None,
        shared_experts: SharedExperts | None = None,
        reduce_group: Any = None,
    ) -> None:
        """Not to be called directly; the last four are :class:`LayerOptions`'."""
        super().__init__(runtime, label, identity)
        self.router = router
        self.shared_experts = shared_experts
        self.reduce_group = reduce_group
        self._op_name = layer_op.enroll(runtime)
        bias = correction_bias
        if bias is not None:  # in memory of its own: the caller's tensor may change later
            with torch.inference_mode(False):
                bias = bias.detach().resolve_neg().to(runtime.device, copy=True)
        self.register_buffer("correction_bias", bias, persistent=False)

    # building --------------------------------------------------------------------------------

    @classmethod
    @spelled_out
    def from_checkpoint(
        cls,
        path: str | Path,
        layer: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        act_dtype: str | None = None,
        **options: Unpack[LayerOptions],
    ) -> FusedMoE:
        """The MoE layer numbered ``layer`` of a checkpoint folder, or a rank's part of it.

        tp_rank, tp_size  this rank of tensor parallelism, and how many there are
        act_dtype  ``bfloat16``, ``float16`` or ``float32``; the model's own when left out
        options    :class:`autosel.layer_build.LayerOptions`; the router's rule and bias come from
                   the checkpoint

        Raises ConfigError and CheckpointError for what cannot be read, UnsupportedError for a
        split that does not divide, NothingUsableError when nothing runs the layer here.
        """
        from autosel.checkpoint import Checkpoint

        with making(options):
            check_options({"path": path, "tp_rank": tp_rank, "tp_size": tp_size})
            source = CheckpointSource(str(path), layer, tp_rank, tp_size, act_dtype=act_dtype)
            placed = options.get("expert_map")
            if placed is not None:
                source = replace(source, held=held_experts(placed, source.problem))
            else:
                rank, size = options.get("ep_rank", 0), options.get("ep_size", 1)
                source = replace(source, ep_rank=rank, ep_size=size)
            if "router" not in options:
                opened = Checkpoint.open(path)
                options["router"] = opened.layer(layer).router
                bias = opened.router(layer).get("e_score_correction_bias")
                options.setdefault("correction_bias", bias)
        return cls.from_source(source, **options)

    @classmethod
    @spelled_out
    def from_source(cls, source: WeightSource, **options: Unpack[LayerOptions]) -> FusedMoE:
        """A layer whose weights ``source`` loads, now and again should a candidate fail later.

        ``options`` are those of :class:`autosel.layer_build.LayerOptions`. ``ep_rank``,
        ``ep_size`` or ``expert_map`` must say which experts the source loads; RoutingError where
        a :class:`CheckpointSource` says otherwise.
        """
        model = None
        with making(options):
            if isinstance(source, CheckpointSource):
                model = source.path
                check_held(source, options)
            if not hasattr(source, "load"):
                found = type(source).__name__
                raise AutoselError(field_error("FusedMoE", "source", found, "a WeightSource"))
            problem = source.problem
        return cls._build(lambda where: source.load(where), problem, source.label, options, model)

    @classmethod
    @spelled_out
    def from_experts(cls, experts: CanonicalExperts, **options: Unpack[LayerOptions]) -> FusedMoE:
        """A layer from weights in memory, which it does not keep.

        ``options`` are those of :class:`autosel.layer_build.LayerOptions`.
        Should a candidate fail later and the next one need another layout, the call raises.
        Raises CheckpointError for tensors that disagree with the experts' problem.
        """
        with making(options):
            if not isinstance(experts, CanonicalExperts):
                found = type(experts).__name__
                raise AutoselError(field_error("FusedMoE", "experts", found, "CanonicalExperts"))
            check_experts(experts)
        held: list[CanonicalExperts] = [experts]

        def load(where: torch.device) -> CanonicalExperts:
            if not held:
                raise AutoselError(
                    field_error("FusedMoE", "weights to pack again", "none", "from_checkpoint")
                )
            return held[0].to(where)

        try:
            return cls._build(load, experts.problem, "weights in memory", options)
        finally:
            held.clear()

    @classmethod
    def _build(
        cls,
        load: Load,
        problem: Problem,
        label: str,
        given: LayerOptions,
        model: str | None = None,
    ) -> FusedMoE:
        runtime, identity = build(load, problem, given, model)
        options: LayerOptions = {**DEFAULTS, **given}
        return cls(
            runtime,
            label=label,
            identity=identity,
            router=options["router"],
            correction_bias=options["correction_bias"],
            shared_experts=options["shared_experts"],
            reduce_group=options["reduce_group"],
        )

    # running ---------------------------------------------------------------------------------

    def forward(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        trusted: bool = False,
        shared_experts_input: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """The layer's output, shaped like ``x``, in the act dtype.

        x             ``[..., H]`` in the act dtype, any strides; no tokens at all are fine
        topk_ids      GLOBAL expert ids ``[..., top_k]``, any integer dtype; a slot whose id is no
                      expert, or an expert held elsewhere, adds nothing
        topk_weights  ``[..., top_k]``, any float dtype
        out           shaped like ``x``, any strides, written and returned when given
        trusted       the caller vouches that every id is -1 or an expert's and that no weight of
                      a -1 is NaN; saves the checks of values where no expert map is needed
        shared_experts_input  what the shared experts get instead of ``x``

        Raises AutoselError (RoutingError) for shapes, dtypes and devices that do not fit, and
        UnsupportedError for ``others``: what :data:`autosel.layer_refusals.REFUSED` names.
        """
        if others:
            refuse("FusedMoE.forward", others)
        followed = seen_by_torch(x, topk_ids, topk_weights)
        if followed:  # so is what is no tensor at all
            check_tensors(x=x, topk_ids=topk_ids, topk_weights=topk_weights)
        shape = x.shape
        if out is not None and (type(out) is not torch.Tensor or out.shape != shape):
            check_out(out, shape)
        if len(shape) != 2:
            for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
                if tensor.dim() == len(shape) and tensor.shape[:-1] != shape[:-1]:
                    found, wanted = list(tensor.shape), f"{list(shape[:-1])} tokens as in x"
                    raise RoutingError(field_error(name, "shape", found, wanted))
            x = _rows("x", x)
            topk_ids = _rows("topk_ids", topk_ids)
            topk_weights = _rows("topk_weights", topk_weights)
        into = None
        if followed:
            y = torch.ops.autosel.fused_moe(x, topk_ids, topk_weights, self._op_name)
        else:
            if out is not None and self._may_write(out, x, shared_experts_input):
                into = out if len(shape) == 2 else out.view(x.shape)
            y = self._runtime.run(x, topk_ids, topk_weights, into, trusted)
        if self.reduce_group is not None:
            torch.distributed.all_reduce(y, group=self.reduce_group)
        if self.shared_experts is not None:
            own = shared_experts_input if shared_experts_input is not None else x.view(shape)
            y = y.add_(shared_rows(self.shared_experts(own), y))
        if out is None:
            answer: torch.Tensor = y if len(shape) == 2 else y.view(shape)
            return answer
        if into is None:
            check_writable(out)
            out.copy_(y.view(shape))
        return out

    def _may_write(
        self, out: torch.Tensor, x: torch.Tensor, shared_input: torch.Tensor | None
    ) -> bool:
        """Whether the routed experts may write into ``out`` at once.

        Else the result is made in memory of its own and copied at the end: rows that do not lie
        together cannot be summed over ranks, and shared experts read their input after the others.
        """
        if not out.is_contiguous():
            return out.dim() == 2 and self.reduce_group is None and self.shared_experts is None
        if self.shared_experts is None:
            return True
        own = x if shared_input is None else shared_input
        return out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()

    def apply_monolithic(
        self, x: torch.Tensor, router_logits: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Route, then run: ``x`` ``[..., H]``, ``router_logits`` ``[..., num_experts]``.

        ``options`` are those of :meth:`forward`. Raises RoutingError where the model's routing
        rule is not known; pass topk_ids and topk_weights there.
        """
        if self.router is None:
            raise RoutingError(
                field_error("FusedMoE.apply_monolithic", "router", "none", "a RouterSpec")
            )
        check_tensors(x=x, router_logits=router_logits)
        check_strided(router_logits=router_logits)
        experts = self.problem.num_experts
        if router_logits.dim() == 0 or router_logits.shape[-1] != experts:
            found, wanted = list(router_logits.shape), f"[..., {experts} experts]"
            raise RoutingError(field_error("router_logits", "shape", found, wanted))
        routing = route(router_logits.reshape(-1, experts), self.router, self.correction_bias)
        slots = (*x.shape[:-1], self.router.top_k)
        if routing.num_tokens != math.prod(slots[:-1]):
            found, wanted = list(router_logits.shape), f"{list(x.shape[:-1])} tokens as in x"
            raise RoutingError(field_error("router_logits", "shape", found, wanted))
        return self.forward(
            x,
            routing.topk_ids.view(slots),
            routing.topk_weights.view(slots),
            **{"trusted": True, **options},
        )

    def apply(self, *args: Any, **options: Any) -> Any:
        """:meth:`forward` when given tensors; torch's own ``Module.apply`` when given a function.

        The name is that of vLLM's method classes, and it is taken in torch.
        """
        if len(args) == 1 and not options and callable(args[0]):
            return super().apply(args[0])
        return self.forward(*args, **options)

    def warm_up(self, *token_counts: int) -> None:
        """Run once with each token count: kernels that are compiled for a size are then there.

        To be called before a CUDA graph of that size is captured; left out, one for each bucket.
        """
        problem, device = self.problem, self._runtime.device
        check_token_counts(token_counts)
        counts = token_counts or tuple(choice.bucket.measured for choice in self.choices)
        for count in counts:
            x = torch.zeros(
                count, problem.hidden_size, dtype=torch_dtype(problem.act_dtype), device=device
            )
            slots = torch.arange(count * problem.top_k, dtype=torch.int32, device=device)
            ids = slots.remainder(problem.num_experts).view(count, problem.top_k)
            self._runtime.run(x, ids, torch.zeros(ids.shape, device=device))
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    # what torch asks of a module -------------------------------------------------------------

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What serves each token bucket, and why."""
        return tuple(entry.choice for entry in self._runtime.entries)

    @property
    def operator_name(self) -> str:
        """The name by which compiled graphs know this layer (:mod:`autosel.layer_op`)."""
        return self._op_name

    @property
    def resident(self) -> dict[str, int]:
        """Bytes of each packed copy of the weights, by the layout's key."""
        return {entry.packed.layout: entry.packed.nbytes for entry in self._runtime.entries}

    def extra_repr(self) -> str:
        served = "; ".join(f"{c.bucket.label}: {c.candidate.key}" for c in self.choices)
        return f"{self.problem.key}, {self._runtime.device}, {served}"


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``[..., N]`` as ``[M, N]``."""
    if tensor.dim() == 0 or tensor.shape[-1] == 0:
        raise RoutingError(field_error(name, "shape", list(tensor.shape), "[..., values]"))
    return tensor.reshape(-1, tensor.shape[-1])
