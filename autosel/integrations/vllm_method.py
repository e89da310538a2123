"""What vLLM calls in place of its own method for a layer that autosel runs."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from autosel.errors import AutoselError, field_error
from autosel.layer import FusedMoE


def method_class(module: Any) -> Any:
    """A subclass of ``FusedMoEMethodBase`` of ``module``, which is vLLM's of that name.

    It has no modular kernel, so vLLM routes, runs shared experts, scales and sums over ranks by
    itself, as it does for any such method.
    """
    base: Any = module.FusedMoEMethodBase

    class AutoselMoEMethod(base):  # type: ignore[misc]
        """Runs the routed experts of one layer, each call with the candidate of its token count."""

        def __init__(self, moe: Any, experts: FusedMoE) -> None:
            super().__init__(moe)
            #: Not a submodule of the vLLM model: its packed weights are no parameters.
            self.experts = experts

        @property
        def method_name(self) -> str:
            return "AutoselMoEMethod"

        def create_weights(self, *args: Any, **options: Any) -> NoReturn:
            raise AutoselError(
                field_error(
                    "autosel in vLLM", "weights", "to be created", "loaded by vLLM's method"
                )
            )

        def process_weights_after_loading(self, layer: Any) -> NoReturn:
            """Packed weights are not replaced in place, and stale ones must not be used."""
            raise AutoselError(
                field_error(
                    f"autosel in vLLM: {layer.layer_name}",
                    "weights",
                    "loaded again",
                    "once (switch autosel off to reload weights: AUTOSEL_VLLM=0)",
                )
            )

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            return None

        def apply(
            self,
            layer: Any,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: Any,
            shared_experts_input: torch.Tensor | None,
        ) -> torch.Tensor:
            """``x`` ``[M, H]``, routing ``[M, top_k]``: the routed experts' output ``[M, H]``.

            Ids come from vLLM's router, so their values need no check here. Shared experts are
            vLLM's runner's, which overlaps them only with kernels that say they can.
            """
            out: torch.Tensor = self.experts(x, topk_ids, topk_weights, trusted=True)
            return out

    return AutoselMoEMethod
