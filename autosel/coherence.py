"""What many outputs of a GEMM have in common: errors of its inputs then arrive together.

An error of one input reaches every output through one column of the weights. Where the columns are
alike (all weights of an expert have one sign, say), all outputs are off at once and the next GEMM
adds that up instead of averaging it out. The leading singular directions of the weights hold it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

#: Directions kept. Gate and up may each have one; random weights have none worth the name.
RANK = 2

#: Steps of the iteration. A direction that matters stands far above the rest, so that each step
#: gains a factor of the gap squared.
STEPS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Leading:
    """``W ~ directions @ profiles``, the best approximation of that rank.

    directions  ``[N, r]``, orthonormal: how much each output takes part
    profiles    ``[r, K]``, orthogonal rows: what of the inputs it takes
    """

    directions: torch.Tensor
    profiles: torch.Tensor

    @staticmethod
    def of(weight: torch.Tensor) -> Leading:
        """Of ``weight`` ``[N, K]``, by block power iteration from a fixed start."""
        outputs, inputs = weight.shape
        rank = min(RANK, outputs, inputs)
        start = _start(inputs, rank, weight.dtype, weight.device).clone()
        start[:, 0] = weight.sum(dim=0)  # what weights of one sign have in common
        # Scaled, since squares of small scales would leave float32's range.
        size = weight.abs().amax().clamp(min=torch.finfo(weight.dtype).tiny)
        scaled = weight / size
        basis = scaled @ _orthonormal(start)  # [N, r]
        for _ in range(STEPS):
            basis = scaled @ (scaled.T @ _orthonormal(basis))
        directions = _orthonormal(basis)
        profiles = directions.T @ scaled  # [r, K]
        turn = _eigenvectors((profiles @ profiles.T).double()).to(weight)
        return Leading(directions @ turn, turn.T @ profiles * size)

    def variances(self, inputs: torch.Tensor) -> torch.Tensor:
        """Variance ``[R, r]`` of each direction for inputs whose variances are ``[R, K]``."""
        return inputs @ self.profiles.square().T


@functools.lru_cache(maxsize=16)
def _start(inputs: int, rank: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The same random columns ``[K, r]`` for every weight of a size."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(inputs, rank, generator=generator).to(dtype).to(device)


def _eigenvectors(matrix: torch.Tensor) -> torch.Tensor:
    """Eigenvectors, as columns, of a symmetric matrix ``[r, r]`` of at most two rows.

    Turned on the device: the host would wait for it, once a weight.
    """
    if len(matrix) < 2:
        return torch.ones_like(matrix)
    half = torch.atan2(2 * matrix[0, 1], matrix[0, 0] - matrix[1, 1]) / 2
    cos, sin = half.cos(), half.sin()
    return torch.stack([torch.stack([cos, -sin]), torch.stack([sin, cos])])


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Gram and Schmidt on a few columns; those that are nothing stay 0."""
    made: list[torch.Tensor] = []
    for column in columns.T:
        for other in made:
            column = column - (other @ column) * other
        made.append(column / column.norm().clamp(min=torch.finfo(column.dtype).tiny))
    return torch.stack(made, dim=1)
