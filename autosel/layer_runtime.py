"""A layer at work: its table of candidates with their packed weights, and one call.

The table is built when the layer is made: every layout is packed, every candidate run once on a
small input and compared with the reference, so that a winner that no longer works here is found
before a model runs. A call then finds its bucket by bisection; the table is replaced as a whole,
never changed, so that calls in other threads see the old one or the new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autosel import registry, workspace
from autosel.compare import compare
from autosel.core import CanonicalExperts, Routing, Status
from autosel.dispatch import apply, check_result, check_strided
from autosel.dtypes import torch_dtype
from autosel.errors import AutoselError, RankError, UnsupportedError, field_error
from autosel.expert_map import local_ids
from autosel.failures import failed, is_out_of_memory, is_passing
from autosel.handlers import let_through
from autosel.interfaces import Backend, PackedExperts
from autosel.layer_check import Probe, make_probe
from autosel.layer_choice import Choice, Chooser, Fault
from autosel.layer_lookup import Lookup
from autosel.layer_surroundings import capturing, for_building, for_calls, undisturbed
from autosel.layer_watched import RunFailedError, Watched
from autosel.ranks_choice import SharedChooser

#: Gives the layer's weights, or raises AutoselError where they are gone for good.
Loader = Callable[[], CanonicalExperts]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One bucket, ready to run."""

    choice: Choice
    backend: Backend
    packed: PackedExperts
    params: Mapping[str, Any]


class _FaultyError(Exception):
    """A candidate that cannot serve, with the status and reason of a measurement.

    ``tell``: the database is to be told. Not where the reason lies in this layer's values, or may
    be gone the next time.
    """

    def __init__(self, status: Status, reason: str, *, tell: bool = True) -> None:
        super().__init__(reason)
        self.status, self.reason, self.tell = status, reason, tell


class LayerRuntime:
    """Runs one layer; build it on the thread that loads the model."""

    def __init__(
        self,
        loader: Loader,
        chooser: Chooser | SharedChooser,
        device: torch.device,
        expert_map: torch.Tensor | None,
        *,
        check: bool = True,
    ) -> None:
        self.problem = chooser.problem
        self.device = device
        self.expert_map = expert_map
        self._index = None if device.type == "cpu" else device.index
        self._loader, self._chooser, self._check = loader, chooser, check
        self._dtype = torch_dtype(self.problem.act_dtype)
        self._width, self._top_k = self.problem.hidden_size, self.problem.top_k
        self._lock = threading.Lock()
        self._packed: dict[str, PackedExperts] = {}
        self._probe: Probe | None = None  # kept: it is small, and the weights may be gone later
        self._table = self._build()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The buckets in order."""
        return self._table.entries

    def run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None = None,
        trusted: bool = False,
        compiled: bool = False,
    ) -> torch.Tensor:
        """The layer's output ``[M, H]``; see :meth:`autosel.layer.FusedMoE.forward`.

        A candidate whose backend raises is withdrawn and the next one takes the call over.
        """
        if undisturbed(self._index):
            return self._run(x, topk_ids, topk_weights, out, trusted, compiled)
        with for_calls(self.device):
            return self._run(x, topk_ids, topk_weights, out, trusted, compiled)

    def _run(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        trusted: bool,
        compiled: bool,
    ) -> torch.Tensor:
        while True:
            shape = x.shape
            entry = self._table.at(shape[0])
            # Inside torch.compile the compiled graph plans memory, and its pools are private.
            held = None if compiled else workspace.begin(self.device)
            try:
                routing = self._ready(entry, shape, x, topk_ids, topk_weights, out, trusted)
                if routing is not None:
                    return self._direct(entry, x, routing, out)
                return apply(
                    entry.backend,
                    entry.packed,
                    x,
                    Routing(topk_ids, topk_weights),
                    entry.params,
                    expert_map=self.expert_map,
                    out=out,
                    checked_map=True,
                )
            except RunFailedError as error:
                cause = error.__cause__
                assert cause is not None
                failure = cause
            except RuntimeError:
                # What torch says of a sparse tensor is no line for a user.
                check_strided(x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
                raise
            finally:
                workspace.end(held)
            # A kernel cannot read such tensors: that is the caller's mistake.
            check_strided(x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
            self._replace(entry, failure, x.shape[0])

    def _direct(
        self, entry: Entry, x: torch.Tensor, routing: Routing, out: torch.Tensor | None
    ) -> torch.Tensor:
        """A call whose tensors are already what a backend is promised."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._direct(entry, x, routing, out)
        buffer = torch.empty_like(x) if out is None else out
        result = entry.backend.run(entry.packed, x, routing, entry.params, buffer)
        return check_result(entry.backend, result, buffer)

    def _ready(
        self,
        entry: Entry,
        shape: torch.Size,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        trusted: bool,
    ) -> Routing | None:
        """The routing as the backend may have it at once, or None where more is to be done.
        ``shape`` is that of ``x``.

        Looks at metadata alone; values of ids are the kernel's own matter, or the caller's.
        """
        any_ids, placed, rows = entry.backend.reads_any_ids, self.expert_map, shape[0]
        # A negated view holds its values with the wrong sign until it is copied.
        if not (
            (any_ids or (trusted and placed is None))
            and rows > 0
            and x.dtype is self._dtype
            and topk_weights.dtype is torch.float32
            and shape == (rows, self._width)
            and topk_ids.shape == topk_weights.shape == (rows, self._top_k)
            and x.is_contiguous()
            and topk_weights.is_contiguous()
            and not x.is_neg()
            and not topk_weights.is_neg()
            and x.device == topk_ids.device == topk_weights.device == self.device
            and (out is None or self._apart(out, x, topk_ids, topk_weights))
        ):
            return None
        if (
            placed is None
            and topk_ids.dtype is torch.int32
            and topk_ids.is_contiguous()
            and not topk_ids.is_neg()
        ):
            return Routing(topk_ids, topk_weights)
        if any_ids and topk_ids.dtype in (torch.int32, torch.int64):
            return Routing(local_ids(topk_ids, self.problem, placed), topk_weights)
        return None

    def _apart(
        self, out: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> bool:
        """Whether a backend may write into ``out``, which is shaped like ``x``, while it reads the
        others. Of these only ids may have gaps, and such ids are copied first."""
        if not (
            out.dtype is x.dtype
            and out.device == x.device
            and out.is_contiguous()
            and not out.is_neg()
        ):
            return False
        start, size = out.data_ptr(), out.nbytes
        return not (
            -size < x.data_ptr() - start < size
            or -weights.nbytes < weights.data_ptr() - start < size
            or -ids.nbytes < ids.data_ptr() - start < size
        )

    # building --------------------------------------------------------------------------------

    def _build(self) -> Lookup[Entry]:
        """Pack, run once, compare; whoever fails is withdrawn and the table made again.

        Each round withdraws one candidate or ends, so there is no loop without end.
        """
        with for_building(self.device):
            return self._built(_Once(self._loader))

    def _built(self, source: _Once) -> Lookup[Entry]:
        proven: dict[object, Entry] = {}
        while True:
            choices = self._chooser.table()
            needed = {choice.candidate.layout for choice in choices}
            for key in [key for key in self._packed if key not in needed]:
                del self._packed[key]
            try:
                entries, fault = self._proven(choices, proven, source)
            except Exception as error:  # no candidate's fault: weights that cannot be read
                if isinstance(self._chooser, SharedChooser):
                    self._chooser.abort(error)  # the other ranks wait for this one
                raise
            if self._chooser.settle(fault):
                return Lookup([(entry.choice.bucket, entry) for entry in entries])

    def _proven(
        self, choices: tuple[Choice, ...], proven: dict[object, Entry], source: _Once
    ) -> tuple[list[Entry], Fault | None]:
        """Entries that are packed, run and compared, up to the first that cannot serve."""
        entries: list[Entry] = []
        for choice in choices:
            try:
                entry = self._entry(choice, source)
                if choice.candidate not in proven:
                    self._prove(entry, source)
                    proven[choice.candidate] = entry
            except _FaultyError as fault:
                return entries, Fault(choice, fault.status, fault.reason, fault.tell)
            entries.append(entry)
        return entries, None

    def _entry(self, choice: Choice, source: _Once) -> Entry:
        candidate, params = choice.candidate, choice.candidate.params_dict
        step = "lookup"
        try:
            backend = registry.get(candidate.backend)
            support = backend.supports(self.problem, self._chooser.device)
            if not support:
                raise _FaultyError("unsupported", str(support))
            step = "layout"
            layout = backend.layout(self.problem, params)
        except Exception as error:
            raise _faulty(error, candidate.backend, step) from error
        if layout.key != candidate.layout:
            where = f"{candidate.backend} layout"
            raise _FaultyError("failed", field_error(where, "key", layout.key, candidate.layout))
        if layout.key not in self._packed:
            experts = source.experts  # what cannot be read is no fault of a candidate
            try:
                self._packed[layout.key] = layout.pack(experts)
                _synchronize(self.device)
            except UnsupportedError as error:
                raise _FaultyError("unsupported", str(error), tell=False) from error
            except Exception as error:
                raise _faulty(error, candidate.backend, "pack") from error
        return Entry(choice, Watched(backend), self._packed[layout.key], params)

    def _prove(self, entry: Entry, source: _Once) -> None:
        """First run, and the comparison with the reference."""
        if not self._check:
            return
        if self._probe is None:
            self._probe = make_probe(source.experts, self.expert_map)
        probe = self._probe
        name = entry.choice.candidate.backend
        try:
            out = apply(
                entry.backend,
                entry.packed,
                probe.x,
                probe.routing,
                entry.params,
                expert_map=self.expert_map,
            )
            _synchronize(self.device)
        except RunFailedError as error:
            cause = error.__cause__
            assert cause is not None
            raise _faulty(cause, name, "first run") from cause
        except Exception as error:
            raise _faulty(error, name, "first run") from error
        accuracy = registry.get(name).accuracy(entry.params)
        verdict = compare(
            out,
            probe.judged.reference,
            accuracy=accuracy,
            act_dtype=self.problem.act_dtype,
            scale=probe.judged.scales[accuracy],
            overflows=probe.judged.overflows,
        )
        if not verdict:
            raise _FaultyError(verdict.status, f"{name} first run: {verdict.reason}")

    def _replace(self, entry: Entry, cause: BaseException, num_tokens: int) -> None:
        """Withdraw a candidate that raised in a call, or raise where that would be wrong.

        Memory comes and goes; a capture must not be touched; and after a fault that sticks to the
        device every candidate would fail.
        """
        if is_out_of_memory(cause) or capturing(self.device):
            raise cause from None
        if isinstance(self._chooser, SharedChooser):
            # The other ranks run this candidate and may already wait for its output.
            where = f"{entry.choice.candidate.key} failed in a call on one rank of several"
            raise RankError(f"{where}: {' '.join(str(cause).split())}") from cause
        try:
            _synchronize(self.device)
        except Exception as error:
            let_through(error)
            raise cause from None
        with self._lock:
            if self._table.at(num_tokens).choice.candidate != entry.choice.candidate:
                return  # another thread was first
            where = f"{entry.choice.candidate.backend} run with {num_tokens} tokens"
            status, reason = failed(cause, where)
            tell = not is_passing(cause)
            self._chooser.withdraw(entry.choice, status, reason, tell_database=tell)
            try:
                self._table = self._build()
            except AutoselError as error:
                raise AutoselError(f"{reason}; nothing took its place: {error}") from cause


class _Once:
    """The weights while a table is built: loaded when first needed, dropped with this object."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._experts: CanonicalExperts | None = None

    @property
    def experts(self) -> CanonicalExperts:
        if self._experts is None:
            self._experts = self._loader()
        return self._experts


def _faulty(error: BaseException, backend: str, step: str) -> _FaultyError:
    if isinstance(error, _FaultyError):
        return error
    return _FaultyError(*failed(error, f"{backend} {step}"), tell=not is_passing(error))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
