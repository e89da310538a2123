"""Packed weights in memory: each layout packed once, shared by all who read it, freed for room.

A layout's size is known without packing it, so what cannot fit is refused before it is tried: on
a CPU the system would kill the process rather than raise.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch

from autosel.core import CanonicalExperts, Device
from autosel.device import free_memory_bytes
from autosel.errors import AutoselError, field_error
from autosel.failures import call_tamed, is_machine_fault, is_out_of_memory
from autosel.interfaces import Layout, PackedExperts
from autosel.timing import Timer

K = TypeVar("K", bound=Hashable)

#: Room beside the packed weights for what packing and running need meanwhile.
MARGIN = 1.25
RESERVE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Resident:
    """Packed weights and the milliseconds that packing took."""

    packed: PackedExperts
    pack_ms: float


class Residency:
    """The packed weights of one layer. ``experts`` is asked for when the first layout is packed."""

    def __init__(
        self,
        experts: Callable[[], CanonicalExperts],
        device: Device,
        timer: Timer,
        *,
        interruptible: bool = True,
    ) -> None:
        self._experts = experts
        self._interruptible = interruptible
        self._device = device
        self._timer = timer
        self._held: dict[Layout, Resident] = {}
        self._failed: dict[Layout, Exception] = {}

    def get(self, layout: Layout, keep: Collection[Layout] = ()) -> Resident:
        """``layout``'s packed weights, packed now if they are not there.

        Others than ``keep`` are freed, the least recently used first, when there is no room.
        Raises MemoryError with both numbers when that is not enough, and whatever packing raises,
        which is not tried again.
        """
        if layout in self._failed:
            raise self._failed[layout]
        if layout not in self._held:
            experts = self._experts()
            self._make_room(layout, experts, keep)
            self._held[layout] = self._pack(layout, experts)
        self._held[layout] = self._held.pop(layout)  # now the most recently used
        return self._held[layout]

    def drop(self, layout: Layout) -> None:
        """Forget a layout, for instance because a candidate wrote into it."""
        self._held.pop(layout, None)

    def clear(self, keep: Collection[Layout] = ()) -> None:
        """Free every layout but ``keep`` and give the memory back."""
        self._held = {layout: held for layout, held in self._held.items() if layout in keep}
        self.clean_up()

    def clean_up(self) -> None:
        """Collect garbage and give the allocator's unused blocks back."""
        gc.collect()
        empty_cache = getattr(getattr(torch, self._device.torch_device), "empty_cache", None)
        if empty_cache is not None:
            empty_cache()

    def together(self, wanted: Iterable[tuple[K, Layout]]) -> list[list[K]]:
        """Keys in as few groups as possible, in order, whose layouts fit in memory at once."""
        capacity = self._capacity()
        groups: list[list[K]] = []
        sizes: dict[Layout, int] = {}
        for key, layout in wanted:
            size = layout.nbytes(self._experts().problem)
            total = sum(sizes.values()) + (0 if layout in sizes else size)
            if not groups or (capacity is not None and total > capacity):
                groups.append([])
                sizes = {}
            groups[-1].append(key)
            sizes[layout] = size
        return groups

    def _pack(self, layout: Layout, experts: CanonicalExperts) -> Resident:
        made: list[PackedExperts] = []
        start = self._timer.now()
        try:
            # Through the timer, which waits for the device: a fault is then this layout's.
            self._timer.run(lambda: made.append(self._packed(layout, experts)))
        except Exception as error:
            # What did not fit may fit later; a full disk is no property of the layout.
            if not is_out_of_memory(error) and not is_machine_fault(error):
                self._failed[layout] = error
            raise
        pack_ms = (self._timer.now() - start) * 1e3
        if made[0].layout != layout.key:
            raise AutoselError(
                field_error(f"layout {layout.key}", "packed layout", made[0].layout, layout.key)
            )
        return Resident(made[0], pack_ms)

    def _packed(self, layout: Layout, experts: CanonicalExperts) -> PackedExperts:
        return call_tamed(lambda: layout.pack(experts), interruptible=self._interruptible)

    def _make_room(
        self, layout: Layout, experts: CanonicalExperts, keep: Collection[Layout]
    ) -> None:
        needed = int(layout.nbytes(experts.problem) * MARGIN) + RESERVE_BYTES
        while (free := free_memory_bytes(self._device)) is not None and free < needed:
            oldest = next((held for held in self._held if held not in keep), None)
            if oldest is None:
                raise MemoryError(
                    field_error(f"layout {layout.key}", "bytes free", free, f"at least {needed}")
                )
            del self._held[oldest]
            self.clean_up()

    def _capacity(self) -> int | None:
        """Bytes of packed weights that fit at once, the ones held counted as room."""
        free = free_memory_bytes(self._device)
        if free is None:
            return None
        held = sum(resident.packed.nbytes for resident in self._held.values())
        return int((free + held - RESERVE_BYTES) / MARGIN)
