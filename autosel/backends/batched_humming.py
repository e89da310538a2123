"""Humming on batched activations ``[E, T, H]``, as all-to-all dispatch of expert parallelism gives.

The kernels of kind ``grouped_masked``. The buffer is filled from ordinary activations first, see
:mod:`autosel.backends._batches`.
"""

from __future__ import annotations

from typing import ClassVar

from autosel.backends.humming import MASKED, Humming


class BatchedHumming(Humming):
    """Layout, configurations and refusals are those of :mod:`autosel.backends.humming`."""

    name: ClassVar[str] = "batched_humming"
    summary: ClassVar[str] = "humming-kernels on per-expert batches, for all-to-all dispatch"
    kinds: ClassVar[tuple[str, ...]] = (MASKED,)
