"""The few interfaces of vLLM that the plugin uses, as modules that a test can install.

They copy names, signatures and order of events of vLLM 0.33.0 (``PluggableLayer``,
``RoutedExperts``, ``FusedMoEMethodBase``, the three WNA16 methods, ``FusedMoEConfig`` and
``VllmConfig``), not their insides. The tests in ``test_vllm_real.py`` hold them to vLLM itself.
"""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

VERSION = "0.33.0"
_LAYERS = "vllm.model_executor.layers.fused_moe"


class MoEActivation(Enum):
    SILU = "silu"
    GELU = "gelu"


class FusedMoEMethodBase:
    def __init__(self, moe):
        self.moe = moe
        self.moe_quant_config = None
        self.moe_kernel = None

    @property
    def is_monolithic(self):
        return False

    @property
    def topk_indices_dtype(self):
        return None

    def process_weights_after_loading(self, layer):
        raise NotImplementedError

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        raise NotImplementedError


class _WNA16Method(FusedMoEMethodBase):
    """Converts its parameters in place, as vLLM's do, and answers a number nobody else does."""

    def __init__(self, moe, **facts):
        super().__init__(moe)
        self.input_dtype = None
        self.processed = 0
        self.__dict__.update(facts)

    def process_weights_after_loading(self, layer):
        self.processed += 1
        for parameter in layer.parameters():
            parameter.data = parameter.data + 1  # a kernel's format, no longer the checkpoint's

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input):
        return torch.full_like(x, 7.0)


class AutoGPTQMoEMethod(_WNA16Method):
    pass


class AutoAWQMoEMethod(_WNA16Method):
    pass


class CompressedTensorsWNA16MoEMethod(_WNA16Method):
    pass


class UnquantizedFusedMoEMethod(_WNA16Method):
    pass


METHODS = {
    "gptq": AutoGPTQMoEMethod, "gptq_v2": AutoGPTQMoEMethod, "awq": AutoAWQMoEMethod,
    "compressed-tensors": CompressedTensorsWNA16MoEMethod,
}  # fmt: skip


def method_for(quant: dict[str, Any], moe: Any) -> FusedMoEMethodBase:
    """The method that vLLM takes for a checkpoint's ``quantization_config``."""
    kind = quant["quant_method"]
    if kind == "gptq":
        config = SimpleNamespace(is_sym=quant["sym"], full_config=quant)
        return AutoGPTQMoEMethod(moe, quant_config=config)
    if kind == "awq":
        config = SimpleNamespace(zero_point=quant["zero_point"], full_config=quant)
        return AutoAWQMoEMethod(moe, quant_config=config)
    weights = quant["config_groups"]["group_0"]["weights"]
    return CompressedTensorsWNA16MoEMethod(moe, symmetric=weights["symmetric"])


class _Registry:
    """What ``vllm.model_executor.custom_op`` holds; new for each test."""

    def __init__(self):
        self.oot: dict[str, type] = {}


def make_layer_classes(registry: _Registry) -> tuple[type, type]:
    class PluggableLayer(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(registry.oot.get(cls.__name__, cls))

        @classmethod
        def register_oot(cls, _decorated_layer_cls=None, name=None):
            assert cls.__name__ not in registry.oot, "Duplicate layer name"
            registry.oot[name or cls.__name__] = _decorated_layer_cls
            return _decorated_layer_cls

    class RoutedExperts(PluggableLayer):
        def __init__(self, layer_name, moe_config, quant_config, expert_map_manager):
            super().__init__()
            self.layer_name = layer_name
            self.moe_config = moe_config
            self.expert_map_manager = expert_map_manager
            self.hidden_size = moe_config.hidden_dim
            self.intermediate_size_per_partition = moe_config.intermediate_size_per_partition
            self.local_num_experts = moe_config.num_local_experts
            self.top_k = moe_config.experts_per_token
            self.activation = moe_config.activation
            self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = None
            self.apply_router_weight_on_input = False
            self.quant_method = self._get_quant_method(layer_name, quant_config, moe_config)

        def _get_quant_method(self, prefix, quant_config, moe_config):
            return method_for(quant_config, moe_config)

        def _replace_quant_method(self, quant_method):
            self.quant_method = quant_method

        def forward_modular(
            self, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None
        ):
            return self.quant_method.apply(
                layer=self,
                x=x,
                topk_weights=topk_weights,
                topk_ids=topk_ids,
                shared_experts=shared_experts,
                shared_experts_input=shared_experts_input,
            )

        def load(self, stacked: dict[str, torch.Tensor]) -> None:
            for name, tensor in stacked.items():
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    return PluggableLayer, RoutedExperts


def moe_config(**facts: Any) -> SimpleNamespace:
    """A ``FusedMoEConfig`` of one rank; keywords replace values, also of its parallel config."""
    parallel = {
        "tp_size": 1, "tp_rank": 0, "dp_size": 1, "pcp_size": 1, "sp_size": 1, "ep_size": 1,
        "enable_eplb": False,
    }  # fmt: skip
    parallel.update({name: facts.pop(name) for name in list(facts) if name in parallel})
    values = {
        "num_experts": 4, "num_local_experts": facts.get("num_experts", 4),
        "num_logical_experts": facts.get("num_experts", 4), "experts_per_token": 2,
        "hidden_dim": 64, "hidden_dim_unpadded": facts.get("hidden_dim", 64),
        "intermediate_size_per_partition": 32,
        "intermediate_size_per_partition_unpadded": facts.get(
            "intermediate_size_per_partition", 32
        ),
        "intermediate_pad": None, "tp_shard_with_padding": False, "in_dtype": torch.float16,
        "moe_backend": "auto", "is_lora_enabled": False, "activation": MoEActivation.SILU,
        "activation_situ_beta": None, "activation_situ_linear_beta": None,
        **facts,
    }  # fmt: skip
    return SimpleNamespace(moe_parallel_config=SimpleNamespace(**parallel), **values)


def vllm_config(model: str, **additional: Any) -> SimpleNamespace:
    """The parts of a ``VllmConfig`` that are read."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        additional_config={"autosel": additional} if additional else {},
    )


class FakeVllm:
    """An installed vLLM: ``modules`` for ``sys.modules``, ``config`` the current one."""

    def __init__(self, version: str = VERSION) -> None:
        self.registry = _Registry()
        self.pluggable, self.routed_experts = make_layer_classes(self.registry)
        self.config: Any = None
        self.modules = {
            "vllm": _module("vllm", __version__=version),
            "vllm.envs": _module("vllm.envs", VLLM_BATCH_INVARIANT=False),
            "vllm.config": _module("vllm.config", get_current_vllm_config=lambda: self.config),
            "vllm.distributed": _module(
                "vllm.distributed", get_tp_group=lambda: SimpleNamespace(world_size=1)
            ),
            "vllm.model_executor.custom_op": _module(
                "vllm.model_executor.custom_op",
                PluggableLayer=self.pluggable,
                op_registry_oot=self.registry.oot,
            ),
            f"{_LAYERS}.routed_experts": _module(
                f"{_LAYERS}.routed_experts", RoutedExperts=self.routed_experts
            ),
            f"{_LAYERS}.fused_moe_method_base": _module(
                f"{_LAYERS}.fused_moe_method_base", FusedMoEMethodBase=FusedMoEMethodBase
            ),
        }

    def install(self, monkeypatch: Any) -> FakeVllm:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self


def _module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(content)
    return made


def finish_loading(model: nn.Module) -> None:
    """What vLLM's loader does when all weights are there."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            method.process_weights_after_loading(module)
