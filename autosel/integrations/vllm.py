"""The vLLM plugin: WNA16 fused-MoE layers run by autosel where decisions are stored for them.

Installed as the entry point ``autosel`` of ``vllm.general_plugins``, and inert until
``AUTOSEL_VLLM=1``. Written against vLLM 0.32 and 0.33; any other version, and any other signature
of what is used, is left alone with one line.

What is used of vLLM: the layer class ``RoutedExperts`` is replaced by a subclass through vLLM's own
registry of out-of-tree layers (``PluggableLayer.register_oot``). The subclass leaves loading to
vLLM and steps in when a layer's weights are complete: there it either replaces the layer's method
(``_replace_quant_method``) or lets vLLM's own method go on as if nothing had been there.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autosel.errors import AutoselError, field_error
from autosel.integrations import vllm_layer
from autosel.integrations.vllm_layer import Engine, say
from autosel.integrations.vllm_method import method_class
from autosel.integrations.vllm_options import SWITCH, Options, switched_on
from autosel.integrations.vllm_weights import METHODS, drop_parameters, model_folder
from autosel.layer import FusedMoE

__all__ = ["VERSIONS", "in_use", "register"]

#: Releases whose sources this was written against.
VERSIONS = ("0.32", "0.33")
#: Key of vLLM's additional config under which the layers that autosel runs are noted.
SERVED = "autosel_served"

_LAYERS = "vllm.model_executor.layers.fused_moe"
#: What is called or overridden, by module, name and the parameters it must have.
SIGNATURES: dict[tuple[str, str], tuple[str, ...]] = {
    (f"{_LAYERS}.routed_experts", "RoutedExperts._get_quant_method"): (
        "self", "prefix", "quant_config", "moe_config",
    ),
    (f"{_LAYERS}.routed_experts", "RoutedExperts._replace_quant_method"): ("self", "quant_method"),
    (f"{_LAYERS}.routed_experts", "RoutedExperts.forward_modular"): (
        "self", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
    ),
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase.__init__"): ("self", "moe"),
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase.apply"): (
        "self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input",
    ),
    (f"{_LAYERS}.fused_moe_method_base", "FusedMoEMethodBase.process_weights_after_loading"): (
        "self", "layer",
    ),
    ("vllm.model_executor.custom_op", "PluggableLayer.register_oot"): (
        "_decorated_layer_cls", "name",
    ),
    ("vllm.config", "get_current_vllm_config"): (),
    ("vllm.distributed", "get_tp_group"): (),
}  # fmt: skip


def register() -> None:
    """The entry point. vLLM calls it in every process; it may be called again, and never raises."""
    try:
        if not switched_on():
            return
    except AutoselError as error:
        say("stays off: ", str(error), logging.WARNING)
        return
    try:
        _install()
    except AutoselError as error:
        say("leaves vLLM as it is: ", str(error), logging.WARNING)
    except Exception as error:  # a vLLM that imports or behaves in another way
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        say("leaves vLLM as it is: ", reason, logging.WARNING)


def in_use(model: torch.nn.Module) -> dict[str, str]:
    """Each WNA16 MoE layer of a loaded vLLM model by its name: what serves it, or why vLLM does.

    ``model`` as in ``llm.apply_model(in_use)``. Empty where the plugin is off.
    """
    found: dict[str, str] = {}
    for module in model.modules():
        status = getattr(module, "autosel_status", None)
        if isinstance(status, str):
            found[str(getattr(module, "layer_name", len(found)))] = status
    return found


def _install() -> None:
    """Put the subclass in place; AutoselError for a vLLM that is not known."""
    version = str(importlib.import_module("vllm").__version__)
    if not any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        known = " or ".join(f"{known}.x" for known in VERSIONS)
        raise AutoselError(field_error("vLLM", "version", version, known))
    for (module, name), wanted in SIGNATURES.items():
        _require_signature(module, name, wanted)
    custom_op = importlib.import_module("vllm.model_executor.custom_op")
    base: Any = importlib.import_module(f"{_LAYERS}.routed_experts").RoutedExperts
    taken = custom_op.op_registry_oot.get(base.__name__)
    if getattr(taken, "autosel_installed", False):
        return
    if taken is not None:
        raise AutoselError(
            field_error("vLLM", "RoutedExperts", f"replaced by {taken.__module__}", "vLLM's own")
        )
    base.register_oot(_layer_class(base))


def _require_signature(module: str, name: str, wanted: tuple[str, ...]) -> None:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise AutoselError(field_error(f"vLLM {module}", name, "none", "a function"))
    given = tuple(inspect.signature(found).parameters)
    if given != wanted:
        raise AutoselError(
            field_error(f"vLLM {name}", "parameters", ", ".join(given), ", ".join(wanted))
        )


def _layer_class(base: Any) -> Any:
    """vLLM's ``RoutedExperts``, watching for the end of loading."""
    made = method_class(importlib.import_module(f"{_LAYERS}.fused_moe_method_base"))

    class AutoselRoutedExperts(base):  # type: ignore[misc]
        autosel_installed = True

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            # Not said where it is registered: vLLM sets its logging up after loading plugins.
            say(f"on ({SWITCH}): ", "a line for each kind of MoE layer follows")
            method = super()._get_quant_method(prefix, quant_config, moe_config)
            try:
                _watch(self, method, made)
            except Exception as error:
                say(f"leaves {prefix} to vLLM: ", f"{type(error).__name__}: {error}")
            return method

    return AutoselRoutedExperts


def _watch(layer: Any, method: Any, made: Any) -> None:
    """Have ``method`` ask autosel first when vLLM tells it that the weights are loaded.

    The method stays the object and the class it was: vLLM's loader goes by the name of its class.
    """
    if type(method).__name__ not in METHODS:
        reason = f"{type(method).__name__} is none of {', '.join(METHODS)}"
        _left(layer, reason)
        return
    config = importlib.import_module("vllm.config").get_current_vllm_config()
    original = method.process_weights_after_loading

    def after_loading(loaded: Any) -> None:
        del method.process_weights_after_loading  # the class's own again
        answer = _asked(loaded, method, config)
        if isinstance(answer, str):
            _left(loaded, answer)
            original(loaded)
            return
        drop_parameters(loaded)
        loaded._replace_quant_method(made(method.moe, answer))
        text = vllm_layer.table(answer)
        loaded.autosel_status = text
        # Part of the key of vLLM's compile cache: on CPUs the operator's name is in the graph.
        noted = config.additional_config.setdefault(SERVED, {})
        noted[loaded.layer_name] = [answer.operator_name, text]
        say(f"runs {loaded.layer_name}: ", text)

    method.process_weights_after_loading = after_loading


def _asked(layer: Any, method: Any, config: Any) -> FusedMoE | str:
    try:
        engine = _engine(config)
    except Exception as error:  # the same on all ranks: nothing of a layer is looked at
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return vllm_layer.take_over(layer, method, engine)


def _left(layer: Any, reason: str) -> None:
    layer.autosel_status = f"vLLM's own: {reason}"
    say(f"leaves {layer.layer_name} to vLLM: ", reason)


def _engine(config: Any) -> Engine:
    """What of vLLM's configuration a layer needs to know. Never raises: a fault is a reason.

    An option that is not understood is reported where the folder is asked for, which is after the
    ranks can agree on it.
    """
    options, fault = Options(), None
    try:
        options = Options.of(config.additional_config)
        if importlib.import_module("vllm.envs").VLLM_BATCH_INVARIANT:
            options = replace(options, require=(*options.require, "batch_invariant"))
    except AutoselError as error:
        fault = error

    def folder() -> Path:
        if fault is not None:
            raise fault
        model, load = config.model_config, config.load_config
        if str(load.load_format) == "dummy":
            raise AutoselError("its weights are made up (load_format dummy)")
        return model_folder(options.model or model.model, model.revision, load.download_dir)

    sizes = config.compilation_config.cudagraph_capture_sizes or ()
    return Engine(options, folder, tuple(int(size) for size in sizes), _agreement())


def _agreement() -> Callable[[str], bool]:
    """How the ranks of vLLM's tensor (and expert) parallel group agree on one text."""
    group = importlib.import_module("vllm.distributed").get_tp_group()
    if group.world_size == 1:
        return bool
    return partial(agreed, group.cpu_group, group.world_size)


def agreed(group: Any, size: int, text: str) -> bool:
    """Whether all ``size`` ranks of ``group`` (gloo) said the same, and something."""
    digest = hashlib.sha256(text.encode()).digest() if text else bytes(32)
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(size)]
    torch.distributed.all_gather(every, own, group=group)
    return bool(text) and all(torch.equal(other, own) for other in every)
