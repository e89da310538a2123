"""What serving engines pass to a quantised MoE layer and this one has no use for, each with why.

The names are vLLM's (``FusedMoEMethodBase.apply`` and ``apply_monolithic``, the layer's
attributes). Nothing of it is dropped silently: None, which engines pass where they do not use a
thing, is accepted, and everything else is refused by one line.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autosel.errors import UnsupportedError, field_error

_STATIC = (
    "none: 8-bit activations are scaled row by row as they come (allow_a8), 16-bit ones not at all"
)
_REPLICAS = "none: each expert is held once over the ranks (place them with expert_map)"

#: Name to what is expected instead.
REFUSED: dict[str, str] = {
    "input_ids": "none: routing by token id (hash tables) is not built; pass topk_ids",
    "routing_sink": "none: no routing rule here has a sink; route outside and pass topk_ids",
    "enable_eplb": _REPLICAS,
    "expert_load_view": _REPLICAS,
    "logical_to_physical_map": _REPLICAS,
    "logical_replica_count": _REPLICAS,
    "num_redundant_experts": _REPLICAS,
    **dict.fromkeys(("a13_scale", "a1_scale", "a2_scale"), _STATIC),
    **dict.fromkeys(("a1_gscale", "a2_gscale", "g1_alphas", "g2_alphas"), _STATIC),
    **dict.fromkeys(("w13_input_scale", "w2_input_scale", "input_scale"), _STATIC),
    **dict.fromkeys(("w13_input_global_scale", "w2_input_global_scale"), _STATIC),
    "input_global_scale": _STATIC,
}


def refuse(where: str, given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raise UnsupportedError for what has a value, TypeError for a name that nobody knows.

    ``known`` are the names that would have been right, for the message.
    """
    for name, value in given.items():
        if name not in REFUSED:
            options = f"; there are {', '.join(known)}" if known else ""
            raise TypeError(f"{where}() got an unexpected keyword argument {name!r}{options}")
        if value is not None and value is not False:
            found = "a tensor" if hasattr(value, "shape") else repr(value)
            raise UnsupportedError(field_error(where, name, found, REFUSED[name]))
