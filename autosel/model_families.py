"""What differs between the families of MoE models and is not written in their config files.

One row a family; a model type that is in no row is still read, but its routing is not guessed.
Facts from the models' code in https://github.com/huggingface/transformers (``modeling_*.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autosel.routing_spec import GroupScore, Scoring


@dataclass(frozen=True, slots=True)
class Family:
    """``renormalize`` None: the config's ``norm_topk_prob``, by default ``default_norm``.

    ``stacked_halves``: in a stacked ``gate_up_proj`` all gate rows stand before all up rows; False
    where they alternate. ``intermediate_key`` names the width of one routed expert.
    """

    model_types: tuple[str, ...]
    scoring: Scoring = "softmax"
    renormalize: bool | None = None
    default_norm: bool = False
    group_score: GroupScore = "max"
    grouped: bool = False
    intermediate_key: Literal["intermediate_size", "moe_intermediate_size"] = (
        "moe_intermediate_size"
    )
    activation: str = "silu"
    stacked_halves: bool = True
    router_weight_on_input: bool = False


FAMILIES = (
    Family(
        ("mixtral", "minimax", "granitemoe", "granitemoeshared", "granitemoehybrid"),
        renormalize=True,
        intermediate_key="intermediate_size",
    ),
    Family(("hunyuan_v1_moe",), renormalize=True, intermediate_key="intermediate_size"),
    Family(("olmoe",), intermediate_key="intermediate_size"),
    Family(("flex_olmo",), intermediate_key="intermediate_size"),
    Family(("jamba",), renormalize=False, intermediate_key="intermediate_size"),
    Family(
        ("phimoe",),
        scoring="sparsemixer",
        renormalize=False,
        intermediate_key="intermediate_size",
    ),
    Family(("qwen2_moe", "qwen3_moe")),
    Family(("qwen3_next", "qwen3_omni_moe_text"), default_norm=True),
    Family(
        ("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        renormalize=True,
    ),
    Family(("deepseek_v2",), grouped=True),
    Family(
        (
            "deepseek_v3",
            "deepseek_v32",
            "kimi_k2",
            "glm4_moe",
            "glm4_moe_lite",
            "glm4v_moe",
            "glm4v_moe_text",
            "glm_moe_dsa",
            "exaone_moe",
            "solar_open",
        ),
        scoring="sigmoid",
        default_norm=True,
        grouped=True,
        group_score="top2_sum",
    ),
    Family(("dots1",), scoring="sigmoid", grouped=True, group_score="top2_sum"),
    Family(
        ("nemotron_h",),
        scoring="sigmoid",
        default_norm=True,
        grouped=True,
        group_score="top2_sum",
        activation="relu2",
    ),
    Family(
        ("minimax_m2",),
        scoring="sigmoid",
        renormalize=True,
        intermediate_key="intermediate_size",
    ),
    Family(("lfm2_moe",), scoring="sigmoid", default_norm=True),
    Family(("ernie4_5_moe",), renormalize=True),
    Family(
        ("llama4", "llama4_text"),
        scoring="sigmoid",
        renormalize=False,
        intermediate_key="intermediate_size",
        router_weight_on_input=True,
    ),
    Family(
        ("gpt_oss",),
        renormalize=True,
        intermediate_key="intermediate_size",
        activation="swigluoai",
        stacked_halves=False,
    ),
)


def find_family(model_type: str | None) -> Family | None:
    """The family of a config's ``model_type``, or None."""
    return next((f for f in FAMILIES if model_type in f.model_types), None)
