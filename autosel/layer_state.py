"""What torch asks of a module whose weights are packed for one machine and cannot move."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
from torch import nn

from autosel.core import Problem
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, field_error
from autosel.layer_runtime import LayerRuntime


class PackedModule(nn.Module):
    """In eval mode for good; moving, copying and pickling are refused where they would change it.

    ``state_dict`` holds one small entry, by which loading it checks that the weights are the same.
    """

    def __init__(self, runtime: LayerRuntime, label: str, weights_id: str) -> None:
        super().__init__()
        self.problem: Problem = runtime.problem
        self.label = label
        self._runtime = runtime
        self._weights_id = weights_id
        self.training = False

    def train(self, mode: bool = True) -> Self:
        """Refused for ``mode=True``: there is nothing to train."""
        if mode:
            raise AutoselError(field_error("FusedMoE", "mode", "train", "eval"))
        super().train(False)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """``to``, ``cuda``, ``half`` and the like: allowed where they change nothing here."""
        dtype, device = torch_dtype(self.problem.act_dtype), self._runtime.device
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        for what, found, expected in (
            ("device", moved.device, device),
            ("act dtype", moved.dtype, dtype),
        ):
            if found != expected:
                raise AutoselError(
                    field_error(
                        f"FusedMoE {self.label}: moving packed weights",
                        what,
                        found,
                        f"{expected}; build it for the other one instead",
                    )
                )
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        return self

    def get_extra_state(self) -> torch.Tensor:
        """JSON as uint8, since that is a tensor to every file format."""
        state = {"problem": self.problem.to_dict(), "weights": self._weights_id}
        text = json.dumps(state, sort_keys=True)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Refuse a state that was saved from other weights than these."""
        try:
            found = json.loads(bytes(state.cpu().tolist()).decode())
            problem, weights = Problem.from_dict(found["problem"]), found["weights"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise AutoselError(
                field_error("FusedMoE state", "entry", error, "one saved by FusedMoE")
            ) from None
        for what, theirs, ours in (
            ("layer", problem.key, self.problem.key),
            ("weights", weights, self._weights_id),
        ):
            if theirs != ours:
                raise AutoselError(field_error("FusedMoE state", what, theirs, ours))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise AutoselError(
            field_error("FusedMoE", "copy", "copy or pickle", "from_checkpoint once more")
        )
