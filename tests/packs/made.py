"""Packs for tests: of a made-up machine that knows every field, or of what a database holds."""

from __future__ import annotations

import json
from dataclasses import replace

from autosel.core import Candidate, Device, ErrorFigures, Measurement, TokenBucket
from autosel.decide import decide
from autosel.packs import build, content
from autosel.packs.model import Entry, Measured, Pack, Source, Undecided
from autosel.samples import summary
from tests.fakes import PROBLEM

#: Every field is known, so that any of them can change.
MACHINE = Device(
    kind="cuda",
    name="NVIDIA H200",
    capability=(9, 0),
    multiprocessors=132,
    memory_bytes=150_000_000_000,
    cache_bytes=62_914_560,
    shared_memory_bytes=232_448,
    flags=("sm_90a", "tma"),
    threads=16,
    driver="570.86.15",
    versions=(
        ("autosel-kernels", "sha256:0123456789abcdef0123"),
        ("c++", "g++ (Debian 12.2.0-14) 12.2.0"),
        ("cuda", "12.8"),
        ("torch", "2.9.1+cu128"),
        ("triton", "3.5.0"),
        ("vllm", "0.11.2"),
    ),
    max_clock_mhz=1980,
    mig_slice="1g.18gb",
)
MODE = (("cache", "cold"),)
FAST, SLOW = (Candidate.of(name, {}, "plain") for name in ("quick", "steady"))


def row(candidate=FAST, us=10.0, tokens=4, device=MACHINE, problem=PROBLEM, **changes):
    values = {
        "problem": problem,
        "num_tokens": tokens,
        "routing": "uniform",
        "candidate": candidate,
        "device": device,
        "status": "ok",
        "times_us": tuple(us * (1 + 0.001 * i) for i in range(25)),
        "errors": ErrorFigures(1e-3, 2e-3, 3e-3, 0.0),
        "weight_bytes": 1000,
        "timing": MODE,
    }
    return Measurement(**{**values, **changes})


def source(device=MACHINE, **changes):
    import autosel

    made = Source(device, autosel.__version__, "ab" * 20, "2026-01-31T12:00:00Z", "autosel pack x")
    return replace(made, **changes)


def entry(
    device=MACHINE,
    problem=PROBLEM,
    winner=FAST,
    other=SLOW,
    *,
    samples=True,
    decided="2026-01-30T08:00:00.123456Z",
    **changes,
):
    """Decisions at 1 to 16 and 17 to 64 tokens, nothing above."""
    decisions, rows = [], []
    for low, high, tokens in ((1, 16, 4), (17, 64, 32)):
        made = [
            row(winner, 10.0, tokens, device, problem),
            row(other, 20.0, tokens, device, problem),
            row(
                Candidate.of("marlin"), 1.0, tokens, device, problem,
                status="unsupported", reason="capability: found 7.0, required 8.0", times_us=(),
                errors=None, weight_bytes=None,
            ),
        ]  # fmt: skip
        decisions.append(decide(made, bucket=TokenBucket(low, high, tokens)))
        for item in made:
            kept = item if samples else replace(item, times_us=(), timing=MODE)
            rows.append(Measured(kept, summary(item)))
    values = {
        "problem": problem,
        "source": source(device),
        "routing": "uniform",
        "timing": dict(MODE),
        "decided": decided,
        "decisions": tuple(decisions),
        "undecided": (Undecided(TokenBucket(65, None, 65), "no candidate could be chosen here"),),
        "measured": tuple(rows),
    }
    return Entry(**{**values, **changes})


def model(problem=PROBLEM, name="Tiny-MoE-GPTQ", **changes):
    return build.model(
        name, "checkpoint", [(problem, (0, 1))], model_type="mixtral",
        quantization={"bits": 4, "group_size": 16}, **changes,
    )  # fmt: skip


def pack(*entries, models=None):
    entries = entries or (entry(),)
    return content.sealed(Pack(tuple(models or (model(entries[0].problem),)), tuple(entries)))


def data(made=None):
    """The plain values of a pack's file."""
    return json.loads(content.to_bytes(made or pack()))


def resealed(values):
    """The bytes of changed values with a hash that fits them: a careful forger's file."""
    import hashlib

    body = {k: v for k, v in values.items() if k not in ("sha256", "signature")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    whole = {**values, "sha256": hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()}
    return json.dumps(whole).encode()
