"""Judges candidates on the full set without timing them: what ``autosel verify`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autosel import registry
from autosel.core import Candidate, Device, Measurement, Params
from autosel.failures import CAUGHT, failed
from autosel.interfaces import Backend
from autosel.proofs import Proofs
from autosel.sources import WeightSource
from autosel.store import Store
from autosel.timing import timer_for
from autosel.trial import Bench
from autosel.tune_types import Observer, SweepSettings
from autosel.worker_bench import WorkerBench, bench_for

#: Tokens of the call whose parameters a backend's default is asked for.
NUM_TOKENS = 16


def verify_layer(
    source: WeightSource,
    device: Device,
    *,
    backends: Sequence[str] = (),
    store: Store | None = None,
    seed: int = 0,
    isolate: bool = True,
    observer: Observer | None = None,
) -> Iterator[Measurement]:
    """One row a candidate, with its certificate of the full level; nothing is timed.

    The candidates are every backend's default here and the winners that ``store`` has for the
    layer; ``store`` gets the certificates. A backend that does not support the layer gives a row
    with the reason. Raises AutoselError for an unknown backend or weights that cannot be read.
    """
    chosen = [registry.get(name) for name in backends] or list(registry.all_backends())
    settings = SweepSettings(token_counts=(NUM_TOKENS,), seed=seed, isolate=isolate)
    timer = timer_for(device, replace(settings.timing, flush_bytes=0))
    bench = bench_for(
        source, settings, device, (NUM_TOKENS,), timer, observer or Observer(), isolate=isolate
    )
    proofs = Proofs(store, source.problem, device)
    decided = store.decisions(source.problem, device, allow_a8=True) if store else []
    try:
        for backend in chosen:
            won = [d.winner.params_dict for d in decided if d.winner.backend == backend.name]
            for row in _candidates(bench, backend, source, device, won):
                proofs.keep(row)
                yield row
    finally:
        bench.close()


def _candidates(
    bench: Bench | WorkerBench,
    backend: Backend,
    source: WeightSource,
    device: Device,
    won: Sequence[Params],
) -> Iterator[Measurement]:
    try:
        support = backend.supports(source.problem, device)
        if not support:
            none = Candidate.of(backend.name)
            yield bench.row(none, NUM_TOKENS, "unsupported", str(support))
            return
        default = backend.space(source.problem, NUM_TOKENS, device).default
        points = list({Candidate.of(backend.name, p): p for p in (default, *won)}.values())
    except CAUGHT as error:
        status, reason = failed(error, f"{backend.name} supports")
        yield bench.row(Candidate.of(backend.name), NUM_TOKENS, status, reason)
        return
    for params in points:
        try:
            candidate = bench.candidate(backend, params)
        except CAUGHT as error:
            status, reason = failed(error, f"{backend.name} layout")
            yield bench.row(Candidate.of(backend.name), NUM_TOKENS, status, reason)
            continue
        row = bench.attempt(candidate, NUM_TOKENS)
        yield bench.prove(row) if row.status == "ok" else row
