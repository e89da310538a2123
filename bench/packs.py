"""Time from a cold process's first byte of a pack to the decisions of a 60-layer model.

    python bench/packs.py

Sixty layers share one shape, as in a real model; 14 token counts, 60 candidates each. Cold: nothing
of the pack is in this process's caches (the file is in the operating system's). Then every layer is
looked up at every token count, through :mod:`autosel.tiers` as the layer and ``explain`` do it. The
target is 50 ms for loading and all look-ups together. ``--cpu`` counts this process's processor
time instead of the clock's, for a machine that others use as well.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from autosel import presets
from autosel.core import Candidate, Device, ErrorFigures, Measurement, TokenBucket
from autosel.decide import decide
from autosel.device import detect
from autosel.packs import build, content, library
from autosel.store import Store
from autosel.tiers import Tiers

LAYERS, CANDIDATES, TOKENS = 60, 60, tuple(1 << n for n in range(14))


def store_with(problem, device: Device) -> Store:  # type: ignore[no-untyped-def]
    """A database in memory as after a sweep, with made-up times."""
    store = Store.open(":memory:")
    mode = (("cache", "cold"),)
    backends = ("emulation", "torch_int4", "triton", "marlin")
    for low, high, tokens in zip(
        (1, *(t + 1 for t in TOKENS[:-1])), (*TOKENS[:-1], None), TOKENS, strict=True
    ):
        rows = []
        for number in range(CANDIDATES):
            candidate = Candidate.of(
                backends[number % 4], {"setting": number} if number >= 4 else {}, "plain"
            )
            us = 10.0 * tokens + number
            times = tuple(us * (1 + 0.001 * i) for i in range(25))
            rows.append(
                Measurement(
                    problem, tokens, "uniform", candidate, device, "ok", times_us=times,
                    errors=ErrorFigures(1e-3, 1e-3, 1e-3, 0.0), weight_bytes=10**9, timing=mode,
                )
            )  # fmt: skip
        store.add_measurements(rows)
        decision = decide(rows, bucket=TokenBucket(low, high, tokens))
        store.add_decision(decision, device, mode)  # type: ignore[arg-type]
    return store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds
    now = time.process_time if options.cpu else time.perf_counter
    problem, device = presets.get("qwen3-30b-a3b"), detect("cpu")
    with tempfile.TemporaryDirectory() as folder, store_with(problem, device) as full:
        about = build.model("bench", "checkpoint", [(problem, range(LAYERS))])
        path = Path(folder) / "autosel-pack.json"
        library.why_illegal = lambda *_: ""  # type: ignore[assignment] # made-up candidates
        print("samples  bytes      load ms  60 look-ups ms  together ms (median, least)")
        for samples in (False, True):
            content.write(build.build(full, about, device=device, with_samples=samples), path)
            loads, lookups = [], []
            for _ in range(rounds):
                library._bytes.cache_clear()
                library._read.cache_clear()
                start = now()
                assert library.load(path) is not None
                loads.append(1e3 * (now() - start))
                with Store.open(":memory:") as empty:
                    tiers = Tiers(empty, None, folder)
                    start = now()
                    for _ in range(LAYERS):
                        answers = tiers.answers(problem, device)
                        assert all(answers.find(tokens) is not None for tokens in TOKENS)
                    lookups.append(1e3 * (now() - start))
            both = [a + b for a, b in zip(loads, lookups, strict=True)]
            print(
                f"{samples!s:7}  {path.stat().st_size:9}  {statistics.median(loads):7.1f}  "
                f"{statistics.median(lookups):14.1f}  "
                f"{statistics.median(both):.1f}, {min(both):.1f}"
            )


if __name__ == "__main__":
    main()
