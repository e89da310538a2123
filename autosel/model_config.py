"""Reads what ``config.json`` says about the MoE layers, in all the spellings in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autosel.config_activation import read_activation
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


@dataclass(frozen=True)
class ModelConfig:
    """The model's facts. Fields that a task needs are asked for then, and refused by name."""

    text: Section
    quant: Section | None
    family: Family | None
    model_type: str | None
    root: Section
    layer: int | None = None

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
                if part is not None:  # a quantisation block may stand at any level
                    sections.append(part)
            if part is not None and text is root and any(name in part for name in EXPERT_COUNTS):
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
        return ModelConfig._of(root, text, quant)

    @staticmethod
    def _of(root: Section, text: Section, quant: Section | None) -> ModelConfig:
        if text is not root:
            # The outer level supplies what the text part leaves to it, such as the dtype.
            inherited = {n: v for n, v in root.data.items() if n in ("dtype", "torch_dtype")}
            text = Section(text.file, text.keys, {**inherited, **text.data})
        model_type = text.string("model_type") or root.string("model_type")
        return ModelConfig(text, quant, find_family(model_type), model_type, root)

    def of(self, module: str, layer: int | None = None) -> ModelConfig:
        """The facts for decoder layer ``layer``, and for a module of a part with experts of its
        own, such as ``talker.model.layers`` by ``talker_config``, that part's."""
        for word in module.split("."):
            name = f"{word}_config"
            if not isinstance(self.root.data.get(name), Mapping):
                continue
            part = self.root.section(name)
            for section in (part, part.section("text_config") if part is not None else None):
                if section is not None and any(count in section for count in EXPERT_COUNTS):
                    return replace(ModelConfig._of(self.root, section, self.quant), layer=layer)
        return replace(self, layer=layer)

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
        return read_activation(self.text, self.quant, self.family, self.layer)

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
