"""Scratch memory of a layer's calls, planned once: steady state allocates nothing.

Between :func:`begin` and :func:`end`, :func:`empty` hands out consecutive parts of one buffer that
belongs to this thread, device and stream; elsewhere it is ``torch.empty``. The same sequence of
sizes gets the same tensors again. A call that needs more than there is allocates the rest as
usual, and the buffer grows behind it. All layers share it: on a stream they run one after another.

Not used inside a CUDA graph capture: memory of a graph belongs to the graph's own pool, and must
stay where it is when the buffer grows.
"""

from __future__ import annotations

import math
import threading

import torch

__all__ = ["begin", "empty", "end", "nbytes", "release"]

_ALIGNMENT = 256  # bytes; what torch's own allocators give at least, and TMA needs 128
#: Tensors remembered for one buffer: a dozen a call, for several hundred token counts.
_MOST_VIEWS = 8192


class Workspace:
    """The buffer of one thread on one device and stream."""

    __slots__ = ("buffer", "capacity", "device", "used", "views")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer: torch.Tensor | None = None
        self.capacity = self.used = 0
        self.views: dict[tuple[int, tuple[int, ...], torch.dtype], tuple[torch.Tensor, int]] = {}

    def part(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next part of the buffer, or memory of its own where the buffer is too small."""
        start = self.used
        nbytes = math.prod(shape) * dtype.itemsize
        self.used = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self.buffer is None or self.used > self.capacity:
            return torch.empty(shape, dtype=dtype, device=self.device)
        # Tensors made in inference mode may not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            view = self.buffer[start : start + nbytes].view(dtype).view(shape)
        if len(self.views) >= _MOST_VIEWS:
            self.views.clear()
        self.views[start, shape, dtype] = view, self.used
        return view

    def grow(self) -> None:
        """Make the buffer as large as the call that ended would have needed."""
        size = self.used
        self.drop()
        try:
            with torch.inference_mode(False):
                self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.capacity = size
        except RuntimeError:  # no memory for it: calls go on allocating what they need
            self.drop()

    def drop(self) -> None:
        """Give the buffer back. Work in flight is safe: the allocator hands a block of a stream
        only to work that comes later on that stream."""
        self.views.clear()
        self.buffer, self.capacity = None, 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.active: Workspace | None = None
        self.held: dict[tuple[torch.device, int], Workspace] = {}


_thread = _Thread()


def begin(device: torch.device) -> Workspace | None:
    """Let :func:`empty` plan for ``device`` until :func:`end`; None where it does not.

    That is inside another such bracket, inside a graph capture, and on devices without streams
    that are known here.
    """
    if _thread.active is not None:
        return None
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    elif device.type != "cpu":
        return None
    found = _thread.held.get((device, stream))
    if found is None:
        found = _thread.held[device, stream] = Workspace(device)
    found.used = 0
    _thread.active = found
    return found


def end(workspace: Workspace | None) -> None:
    """Close what :func:`begin` opened, which is passed back."""
    if workspace is not None:
        _thread.active = None
        if workspace.used > workspace.capacity:
            workspace.grow()


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that is good until the end of the call, with anything in it."""
    active = _thread.active
    if active is None or device != active.device:
        return torch.empty(shape, dtype=dtype, device=device)
    found = active.views.get((active.used, shape, dtype))
    if found is None:
        return active.part(shape, dtype)
    view, active.used = found
    return view


def nbytes() -> int:
    """Bytes that this thread's buffers hold, on all devices and streams."""
    return sum(workspace.capacity for workspace in _thread.held.values())


def release() -> None:
    """Give this thread's buffers back; the next calls plan anew."""
    for workspace in _thread.held.values():
        workspace.drop()
