"""Made-up and recorded routings for tuning and verification, the same everywhere for one seed.

The name of a kind is the key stored with timings; parameters stand in it (``zipf:1.5``).
Random numbers come from Philox's raw 64-bit stream, which NumPy promises never to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from autosel.core import Problem, Routing
from autosel.errors import RoutingError, field_error
from autosel.expert_map import local_range
from autosel.routing_file import recorded

#: Not served by any expert.
NOWHERE = -1

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


def make_routing(
    kind: str,
    num_tokens: int,
    problem: Problem,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    rank: int = 0,
) -> Routing:
    """A made-up routing in GLOBAL ids: ids int32, weights float32, both ``[num_tokens, top_k]``.

    uniform        every expert equally likely
    zipf[:s]       popularity of the n-th expert falls as ``n ** -s`` (default 1.2); which expert
                   is the n-th depends on the seed
    one_hot[:e]    every token to expert e, its other slots nowhere (id -1, weight 0)
    all_but_one[:e]  uniform over the experts other than e
    recorded:HASH  consecutive tokens of a recording that was read in this process
                   (:mod:`autosel.routing_file`), from a place that depends on the seed, and round
                   again where it is shorter

    The experts of a token differ, so under expert parallelism a row holds at most the local ones
    and the rest is elsewhere. Without ``:e`` the seed takes one of ``rank``'s own experts.
    Weights are positive; a row sums to something in [0.5, 1), so that a weight left out or
    applied twice shows even with one slot. Raises RoutingError for an unknown kind.
    """
    name, _, parameter = kind.partition(":")
    if name not in (*_KINDS, "recorded"):
        known = ", ".join((*ROUTING_KINDS, "file:PATH"))
        raise RoutingError(field_error("routing kind", "name", kind, known))
    if num_tokens < 0:
        raise RoutingError(field_error("routing kind", "num_tokens", num_tokens, "at least 0"))
    draw = _Draw(seed, problem, rank)
    if name == "recorded":
        ids = _recorded(kind, num_tokens, draw)
    else:
        popularity, slots = _KINDS[name](parameter, draw)
        ids = _distinct(popularity, num_tokens, slots, draw)  # [M, slots]
    short = problem.top_k - ids.shape[1]
    ids = np.pad(ids, ((0, 0), (0, short)), constant_values=NOWHERE)  # [M, top_k]
    weights = 0.25 + draw.uniform(num_tokens, problem.top_k)  # [M, top_k]
    weights[ids == NOWHERE] = 0.0
    total = 0.5 + 0.5 * draw.uniform(num_tokens, 1)
    # A row without any expert keeps its zeros.
    weights *= total / np.maximum(weights.sum(axis=1, keepdims=True), 0.25)
    return Routing(
        torch.from_numpy(ids.astype(np.int32)).to(device),
        torch.from_numpy(weights.astype(np.float32)).to(device),
    )


@dataclass(slots=True)
class _Draw:
    """Uniform doubles in (0, 1), in the order asked for."""

    seed: int
    problem: Problem
    rank: int
    _stream: np.random.Philox | None = None

    def uniform(self, *shape: int) -> _Floats:
        if self._stream is None:
            self._stream = np.random.Philox(key=self.seed)
        raw = np.asarray(self._stream.random_raw(int(np.prod(shape))), dtype=np.uint64)
        values: _Floats = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return values.reshape(shape)

    def expert(self, parameter: str) -> int:
        """The expert named in the kind, else one of this rank's."""
        if not parameter:
            held = local_range(self.problem, self.rank)
            return held[int(self.uniform(1)[0] * len(held))]
        count = self.problem.num_experts
        if not parameter.isdecimal() or int(parameter) >= count:
            raise RoutingError(
                field_error("routing kind", "expert", parameter, f"0 to {count - 1}")
            )
        return int(parameter)


def _distinct(popularity: _Floats, rows: int, slots: int, draw: _Draw) -> _Ids:
    """``slots`` different experts a row, drawn without replacement in proportion to popularity.

    The smallest of ``-log(u) / p`` are such a draw (Efraimidis and Spirakis, 2006).
    """
    with np.errstate(divide="ignore"):
        keys = -np.log(draw.uniform(rows, len(popularity))) / popularity  # [M, E]
    chosen: _Ids = np.argsort(keys, axis=1, kind="stable")[:, :slots].astype(np.int64)
    return chosen


def _recorded(kind: str, num_tokens: int, draw: _Draw) -> _Ids:
    """Consecutive rows of a recording, ``[M, top_k]``: tokens that came together stay together."""
    ids = recorded(kind, draw.problem.num_experts, draw.problem.top_k)
    start = int(draw.uniform(1)[0] * len(ids))
    rows: _Ids = ids[(start + np.arange(num_tokens)) % len(ids)].astype(np.int64)
    return rows


def _uniform(parameter: str, draw: _Draw) -> tuple[_Floats, int]:
    if parameter:
        raise RoutingError(field_error("routing kind", "parameter", parameter, "nothing"))
    return np.ones(draw.problem.num_experts), draw.problem.top_k


def _zipf(parameter: str, draw: _Draw) -> tuple[_Floats, int]:
    try:
        exponent = float(parameter or 1.2)
    except ValueError:
        exponent = np.nan
    if not 0 <= exponent <= 10:
        raise RoutingError(field_error("routing kind", "zipf exponent", parameter, "0 to 10"))
    count = draw.problem.num_experts
    popularity = np.empty(count)
    popularity[np.argsort(draw.uniform(count))] = np.arange(1, count + 1) ** -exponent
    return popularity, draw.problem.top_k


def _one_hot(parameter: str, draw: _Draw) -> tuple[_Floats, int]:
    popularity = np.zeros(draw.problem.num_experts)
    popularity[draw.expert(parameter)] = 1.0
    return popularity, 1


def _all_but_one(parameter: str, draw: _Draw) -> tuple[_Floats, int]:
    popularity = np.ones(draw.problem.num_experts)
    popularity[draw.expert(parameter)] = 0.0
    return popularity, min(draw.problem.top_k, draw.problem.num_experts - 1)


_KINDS: dict[str, Callable[[str, _Draw], tuple[_Floats, int]]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "one_hot": _one_hot,
    "all_but_one": _all_but_one,
}

#: The names that :func:`make_routing` knows, without parameters.
ROUTING_KINDS = tuple(_KINDS)
