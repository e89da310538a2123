"""Our own WNA16 kernels (Triton and Gluon) over the fragment-major tiled layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autosel.core import Problem
from autosel.interfaces import PackedExperts

if TYPE_CHECKING:
    from autosel.kernels.wna16_moe import TiledLayer


def _activation_constants(problem: Problem) -> dict[str, Any]:
    act = problem.activation
    if act.name == "swigluoai":
        return {"activation": act.name, "limit": 7.0, "alpha": 1.702, "beta": 1.0}
    return {
        "activation": act.name,
        "limit": act.limit or 0.0,
        "alpha": 1.0 if act.alpha is None else act.alpha,
        "beta": act.beta or 0.0,
        "linear_beta": act.linear_beta or 0.0,
    }


def tiled_layer(packed: PackedExperts, *, asm: bool = True, pdl: bool = True) -> TiledLayer:
    """The kernels' view of a packed layer."""
    from autosel.kernels.wna16_moe import TiledLayer

    problem, sizes = packed.problem, packed.meta["sizes"]
    return TiledLayer(
        packed.tensors,
        experts=problem.num_local_experts,
        top_k=problem.top_k,
        hidden=sizes.hidden,
        intermediate=sizes.intermediate,
        group13=sizes.group13,
        group2=sizes.group2,
        bits13=problem.w13.num_bits,
        bits2=problem.w2.num_bits,
        symmetric13=problem.w13.symmetric,
        symmetric2=problem.w2.symmetric,
        gated=problem.activation.gated,
        asm=asm,
        pdl=pdl,
        **_activation_constants(problem),
    )
