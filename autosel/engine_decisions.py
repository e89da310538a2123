"""What of the store an engine can use: a backend for its flag, settings for its Triton kernel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autosel.buckets import buckets
from autosel.core import Decision, Device, Problem
from autosel.decide import decide
from autosel.engine_export import BACKEND
from autosel.explanation import COLD
from autosel.records import of_newest_mode
from autosel.store import Store

#: Values of ``--moe-backend`` that vLLM 0.33 takes for WNA16 layers (``map_wna16_backend``), by our
#: backend's name. Other backends of vLLM follow from the platform alone and cannot be named.
VLLM = {
    "triton": "triton", "marlin": "marlin", "humming": "humming",
    "flashinfer_trtllm": "flashinfer_trtllm", "emulation": "emulation", "rdna3": "rdna3",
}  # fmt: skip
#: Backends that vLLM takes by itself, and what makes it do so.
VLLM_BY_ITSELF = {
    "batched_marlin": "--moe-backend marlin with an all-to-all of batched activations",
    "cpu": "VLLM_CPU_INT4_W4A8=0 on a CPU (then ZEN_CPU is refused)",
    "zen_cpu": "VLLM_CPU_INT4_W4A8=1 on a CPU with zentorch",
    "xpu": "the only one on an Intel GPU",
}
#: Values of SGLang's ``--moe-runner-backend`` (``MOE_RUNNER_BACKEND_CHOICES``).
SGLANG = {
    "triton": "triton", "marlin": "marlin", "humming": "humming",
    "flashinfer_trtllm": "flashinfer_trtllm",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """How to make an engine run ``backend`` for all layers; ``flag`` is "" where it has none.

    share  part of the layers' token ranges whose winner it is, by number of buckets
    why    what to know about it, in words
    """

    engine: str
    backend: str
    flag: str
    share: float
    why: str


def triton_decisions(
    store: Store, problem: Problem, device: Device, routing: str = "uniform"
) -> list[Decision]:
    """The best verified Triton settings at each measured token count; empty when none was timed."""
    stored = store.measurements(problem, device, routing, timing=tuple(COLD.items()))
    rows = [
        m for m in of_newest_mode(stored) if m.candidate.backend == BACKEND and m.status == "ok"
    ]
    found = []
    for bucket in buckets({m.num_tokens for m in rows}) if rows else ():
        there = [m for m in rows if m.num_tokens == bucket.measured]
        verdict = decide(there, bucket=bucket)
        if isinstance(verdict, Decision):
            found.append(verdict)
    return found


def engine_flags(decisions: list[Decision]) -> list[EngineFlags]:
    """For each engine the line that makes it run what was decided; several decisions may differ.

    Engines take one backend for all layers and token counts, so the one that wins most buckets is
    named, and how many it wins.
    """
    if not decisions:
        return []
    wins = Counter(d.winner.backend for d in decisions)
    flags = []
    for engine, option, known in (
        ("vllm", "--moe-backend", VLLM),
        ("sglang", "--moe-runner-backend", SGLANG),
    ):
        reachable = {name: count for name, count in wins.items() if name in known}
        if reachable:
            backend, count = max(reachable.items(), key=lambda item: (item[1], item[0]))
            others = ", ".join(sorted(name for name in wins if name != backend))
            why = f"wins {count} of {len(decisions)} token ranges" + (
                f"; elsewhere {others} wins" if others else ""
            )
            share = count / len(decisions)
            flags.append(EngineFlags(engine, backend, f"{option} {known[backend]}", share, why))
            continue
        backend, count = wins.most_common(1)[0]
        itself = VLLM_BY_ITSELF.get(backend) if engine == "vllm" else None
        why = itself or f"{engine} does not have it; autosel's own layer runs it"
        flags.append(EngineFlags(engine, backend, "", count / len(decisions), why))
    return flags
