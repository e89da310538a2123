"""Reads what ``config.json`` says about the MoE layers, in all the spellings in use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autosel.core import ACT_DTYPES, Activation
from autosel.errors import ConfigError, field_error
from autosel.json_file import JsonFile, Section
from autosel.model_families import Family, find_family
from autosel.quant_config import find_quant_config
from autosel.routing_spec import RouterSpec

#: Where multimodal models keep the language model's part.
TEXT_PARTS = (
    ("text_config",),
    ("llm_config",),
    ("language_config",),
    ("thinker_config", "text_config"),
)
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
TOP_KS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "num_selected_experts",
)
SHARED_COUNTS = (
    "n_shared_experts",
    "num_shared_experts",
    "num_shared_expert",
    "moe_num_shared_experts",
)
#: The more particular name wins: Nemotron-H has a second activation for its Mamba blocks.
ACTIVATIONS = ("mlp_hidden_act", "hidden_activation", "hidden_act", "activation_function")

#: Names of config files. No config asks for a plain silu or gelu without a gate.
_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2_no_mul",
    "relu_squared": "relu2_no_mul",
    "swigluoai": "swigluoai",
    "swiglustep": "swiglustep",
    "situ": "situ",
}


@dataclass(frozen=True)
class ModelConfig:
    """The model's facts. Fields that a task needs are asked for then, and refused by name."""

    text: Section
    quant: Section | None
    family: Family | None
    model_type: str | None

    @staticmethod
    def read(folder: Path) -> ModelConfig:
        """Raises ConfigError in one line for a missing, unreadable or contradicting file."""
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(field_error(str(path), "file", "none", "the model's config.json"))
        file = JsonFile.read(path)
        root = Section(file, (), file.data)
        sections = [root]
        text = root
        for keys in TEXT_PARTS:
            part: Section | None = root
            for key in keys:
                part = part.section(key) if part is not None else None
            if part is not None:
                sections.append(part)
                if text is root and any(name in part for name in EXPERT_COUNTS):
                    text = part
        if text is not root:
            for name in (*EXPERT_COUNTS, *TOP_KS, "hidden_size"):
                if name in root and name in text and root.data[name] != text.data[name]:
                    raise ConfigError(
                        field_error(
                            text.where(name),
                            "value",
                            repr(text.data[name]),
                            f"{root.data[name]!r} as in {root.where(name)}",
                        )
                    )
        quant = find_quant_config(folder, sections)
        if text is not root:
            # The outer level supplies what the text part leaves to it, such as the dtype.
            inherited = {n: v for n, v in root.data.items() if n in ("dtype", "torch_dtype")}
            text = Section(text.file, text.keys, {**inherited, **text.data})
        model_type = text.string("model_type") or root.string("model_type")
        return ModelConfig(text, quant, find_family(model_type), model_type)

    @property
    def num_layers(self) -> int:
        """Decoder layers, 0 when not said."""
        return self.text.integer("num_hidden_layers") or 0

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer: the router's width."""
        return self._count(EXPERT_COUNTS)

    @property
    def top_k(self) -> int:
        return self._count(TOP_KS)

    @property
    def hidden_size(self) -> int:
        return self._count(("hidden_size",), per_layer=False)

    @property
    def intermediate_size(self) -> int | None:
        """One routed expert's width, or None when the config does not say it for sure."""
        if "moe_intermediate_size" in self.text:
            return self._count(("moe_intermediate_size",))
        if self.family is not None and self.family.intermediate_key in self.text:
            return self._count((self.family.intermediate_key,))
        return None

    @property
    def num_shared_experts(self) -> int | None:
        """Always-on experts, or None when the config does not say."""
        name = self.text.first(*SHARED_COUNTS)
        return None if name is None else self.text.integer_of_all(name)

    @property
    def router_weight_on_input(self) -> bool:
        return self.family is not None and self.family.router_weight_on_input

    def act_dtype(self, fallback: str) -> str:
        """The model's activation dtype; ``fallback`` (that of the scales) when it is not said."""
        name = "dtype" if "dtype" in self.text else "torch_dtype"
        value = self.text.string(name)
        if value is None or value == "auto":
            return fallback
        value = value.removeprefix("torch.")
        if value not in ACT_DTYPES:
            raise ConfigError(
                field_error(
                    self.text.where(name), "value", repr(value), f"one of {', '.join(ACT_DTYPES)}"
                )
            )
        return value

    def activation(self) -> Activation:
        """The function between the two GEMMs; it also tells whether there must be gates."""
        name = next((n for n in ACTIVATIONS if n in self.text), None)
        if self.family is not None and self.family.activation == "swigluoai":
            value = "swigluoai"  # gpt-oss says silu and means its own clamped form
        elif name is not None:
            value = str(self.text.string(name)).lower()
        elif self.family is not None:
            value = self.family.activation
        else:
            raise ConfigError(
                field_error(self.text.where(ACTIVATIONS[0]), "value", "nothing", "an activation")
            )
        found = _ACTIVATION_NAMES.get(value)
        if found is None:
            raise ConfigError(
                field_error(
                    self.text.where(name or ACTIVATIONS[0]),
                    "activation",
                    repr(value),
                    f"one of {', '.join(_ACTIVATION_NAMES)}",
                )
            )
        return self._with_constants(found)

    def _with_constants(self, name: str) -> Activation:
        """Clamp limit, alpha and beta: those of the quantisation config before the model's own."""

        def constant(in_quant: str, in_model: str) -> float | None:
            if self.quant is not None and in_quant in self.quant:
                return self.quant.number(in_quant)
            return self.text.number(in_model)

        limit = constant("gemm1_clamp_limit", "swiglu_limit")
        alpha = constant("gemm1_alpha", "swiglu_alpha")
        beta = constant("gemm1_beta", "swiglu_beta")
        if name == "swigluoai" and (limit, alpha, beta) != (None, None, None):
            same = (limit in (None, 7.0), alpha in (None, 1.702), beta in (None, 1.0))
            if not all(same):
                return Activation(
                    "swigluoai_uninterleave",
                    limit=7.0 if limit is None else limit,
                    alpha=1.702 if alpha is None else alpha,
                    beta=1.0 if beta is None else beta,
                )
            return Activation(name)
        if name == "silu" and alpha is not None and limit is not None:
            return Activation("swigluoai_uninterleave", limit=limit, alpha=alpha, beta=beta)
        if name == "silu":
            return Activation(name, limit=limit)
        if name == "situ":
            return Activation(
                name,
                beta=self.text.number("situ_beta"),
                linear_beta=self.text.number("situ_linear_beta"),
            )
        return Activation(name)

    def router(self, has_correction_bias: bool) -> RouterSpec | None:
        """The routing rule; None for a model type whose rule is not known."""
        family = self.family
        if family is None:
            return None
        scoring = family.scoring
        declared = self.text.string("scoring_func")
        if declared is not None:
            if declared not in ("softmax", "sigmoid"):
                raise ConfigError(
                    field_error(
                        self.text.where("scoring_func"),
                        "value",
                        repr(declared),
                        "'softmax' or 'sigmoid'",
                    )
                )
            scoring = "sigmoid" if declared == "sigmoid" else "softmax"
        renormalize = family.renormalize
        if renormalize is None:
            stated = self.text.boolean("norm_topk_prob")
            renormalize = family.default_norm if stated is None else stated
        groups, kept = 1, 1
        if family.grouped and self.text.string("topk_method") != "greedy":
            groups = self.text.integer("n_group") or 1
            kept = self.text.integer("topk_group") or groups
            if groups < 1 or self.num_experts % groups or not 1 <= kept <= groups:
                raise ConfigError(
                    field_error(
                        self.text.where("n_group"),
                        "n_group, topk_group",
                        f"{groups}, {kept}",
                        f"a divisor of {self.num_experts} and at most that",
                    )
                )
        factor = self.text.number("routed_scaling_factor")
        return RouterSpec(
            top_k=self.top_k,
            scoring=scoring,
            renormalize=renormalize,
            num_groups=groups,
            topk_groups=kept,
            group_score=family.group_score,
            scaling_factor=1.0 if factor is None else factor,
            has_correction_bias=has_correction_bias,
            jitter=self._jitter() if scoring == "sparsemixer" else 0.0,
        )

    def _jitter(self) -> float:
        found = self.text.number("router_jitter_noise")
        return 0.01 if found is None else found  # the model class's own default

    def _count(self, names: tuple[str, ...], *, per_layer: bool = True) -> int:
        """A size of at least 1; ``per_layer``: it may be spelt once a layer, as Hunyuan's are."""
        name = self.text.first(*names)
        read = self.text.integer_of_all if per_layer else self.text.integer
        value = None if name is None else read(name)
        if value is None or value < 1:
            raise ConfigError(
                field_error(self.text.where(name or names[0]), "value", value, "at least 1")
            )
        return value
