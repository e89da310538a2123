"""zentorch's fused int4 operator; it quantises activations to 8 bits inside."""

from __future__ import annotations

import importlib
import weakref
from importlib import metadata
from typing import Any, ClassVar

import torch

from autosel.backends import _rules
from autosel.backends._per_expert import run_served_slots
from autosel.core import AccuracyClass, Device, Params, Problem, Routing, Support
from autosel.errors import UnsupportedError, field_error
from autosel.interfaces import Backend, Layout, PackedExperts, Requirements
from autosel.layouts import _gemms as gemms
from autosel.layouts.zen_s4 import ZenS4

_PACKAGE = "zentorch"
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")
_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
_GROUP_MULTIPLE = 4
_INPUTS_MULTIPLE = 8


class ZenCpu(Backend):
    """``zentorch::zentorch_fused_moe``, int4 weights with dynamic int8 activations.

    The operator keeps reordered copies of the weights by address. New weights at an address it
    has seen give the old ones' results, so its cache is cleared whenever that could happen.
    """

    name: ClassVar[str] = "zen_cpu"
    summary: ClassVar[str] = "AMD's zentorch fused int4 operator, activations quantised to 8 bits"
    distributions: ClassVar[tuple[str, ...]] = (_PACKAGE,)
    extra: ClassVar[str | None] = "zen"

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def available(self, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("device", device.kind, ("cpu",))
        version, release = _version(), _minor(torch.__version__)
        install = f"pip install '{_PACKAGE}=={release}.*'"
        if needs.need(version is not None, f"package {_PACKAGE}", "not installed", install):
            needs.need(
                _minor(str(version)) == release,
                f"package {_PACKAGE}",
                version,
                f"{release}.* as torch: {install}",
            )
        _rules.instruction_sets(needs, device, _FLAGS)
        return needs.support

    def supports(self, problem: Problem, device: Device) -> Support:
        needs = Requirements()
        needs.one_of("activations' dtype", problem.act_dtype, ("bfloat16",))
        _rules.own_constants(needs, problem, _ACTIVATIONS)
        needs.need(not problem.router_weight_on_input, "router weight", "on input", "on output")
        for name, scheme, (_, _, inputs) in gemms.schemes(problem):
            group = gemms.group_inputs(scheme, inputs)
            needs.one_of(f"{name} bits", scheme.num_bits, (4,))
            needs.need(scheme.symmetric, f"{name} zero points", "present", "symmetric weights")
            needs.need(not scheme.has_g_idx, f"{name} act-order", "g_idx", "contiguous groups")
            needs.multiple(f"{name} inputs of a group", group, _GROUP_MULTIPLE)
            needs.multiple(f"{name} inputs", inputs, group)
            needs.multiple(f"{name} inputs", inputs, _INPUTS_MULTIPLE)
        return Support(self.available(device).reasons + needs.support.reasons)

    def accuracy(self, params: Params) -> AccuracyClass:
        return "a8"

    def layout(self, problem: Problem, params: Params) -> Layout:
        return ZenS4(interleaved=problem.activation.name == "swigluoai")

    def run(
        self,
        packed: PackedExperts,
        x: torch.Tensor,
        routing: Routing,
        params: Params,
        out: torch.Tensor,
    ) -> torch.Tensor:
        operators = _operators()
        tensors, activation = packed.tensors, packed.problem.activation.name
        if self._changed(packed):
            operators.zentorch_clear_weight_cache()

        def run(x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
            out.zero_()  # tokens without an expert may be skipped
            operators.zentorch_fused_moe(
                out,
                x,
                tensors["w13"],
                tensors["w2"],
                tensors.get("w13_bias"),
                tensors.get("w2_bias"),
                routing.topk_weights,
                routing.topk_ids,
                False,
                activation,
                tensors["w13_scales"],
                tensors["w2_scales"],
            )

        return run_served_slots(x, routing, out, run)

    def _changed(self, packed: PackedExperts) -> bool:
        """Whether any tensor is not the one, unwritten since, that was last seen at its address."""
        self._seen = {at: (ref, v) for at, (ref, v) in self._seen.items() if ref() is not None}
        changed = False
        for tensor in packed.tensors.values():
            reference, version = self._seen.get(tensor.data_ptr(), (None, -1))
            if reference is None or reference() is not tensor or version != tensor._version:
                self._seen[tensor.data_ptr()] = (weakref.ref(tensor), tensor._version)
                changed = True
        return changed


def _version() -> str | None:
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _operators() -> Any:
    """``torch.ops.zentorch``, importing the package (seconds) at first use."""
    try:
        importlib.import_module(_PACKAGE)
    except Exception as error:  # its start-up checks raise more than ImportError
        detail = " ".join(str(error).split())
        raise UnsupportedError(field_error(_PACKAGE, "import", detail, "no error")) from error
    operators: Any = torch.ops.zentorch
    for name in ("zentorch_fused_moe", "zentorch_clear_weight_cache"):
        if not hasattr(operators, name):
            raise UnsupportedError(field_error(_PACKAGE, f"operator {name}", "missing", "present"))
    return operators
