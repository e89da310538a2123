"""What a correct candidate does besides: repeat itself, keep rows apart, run from a graph.

Each check answers True or False, None where it could not be made, and a verdict instead where a
result on the way was wrong.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace

import torch

from autosel.compare import Verdict, compare_judged
from autosel.core import AccuracyClass, CanonicalExperts, Params, Routing
from autosel.expert_map import localize
from autosel.guarded import run_guarded, same_bits
from autosel.interfaces import Backend, Layout, PackedExperts
from autosel.verify_cases import Case

#: Calls that must repeat each other, and the seconds they may take. A race that shows in one call
#: of twenty passes 150 calls once in 2000 times; the cases' own calls come on top.
STRESS_CALLS = 150
STRESS_SECONDS = 5.0

#: Fewest calls however long one takes.
STRESS_LEAST = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found: the property's value, a fault met on the way, the calls it took."""

    value: bool | None
    fault: Verdict | None = None
    calls: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A candidate with its packed weights, as the checks call it."""

    backend: Backend
    packed: PackedExperts
    params: Params
    accuracy: AccuracyClass

    def judge(self, case: Case, out: torch.Tensor) -> Verdict:
        act_dtype = self.packed.problem.act_dtype
        return compare_judged(out, case.judged, accuracy=self.accuracy, act_dtype=act_dtype)

    def guarded(self, case: Case) -> tuple[Verdict, torch.Tensor]:
        return run_guarded(self.backend, self.packed, self.params, case, self.accuracy)

    def local(self, case: Case) -> Routing:
        return localize(case.routing, self.packed.problem, case.expert_map, device=case.x.device)


def repeats_itself(subject: Subject, case: Case) -> Finding:
    """Many calls one after the other on the same tensors, as a layer makes them.

    An output that differs from the first is judged: a race is wrong, an order of summation is not.
    The activations and the routing must stay as they are.
    """
    x, routing = case.x.clone(), subject.local(case)
    before = Routing(routing.topk_ids.clone(), routing.topk_weights.clone())
    out = torch.full_like(x, torch.nan)
    first: torch.Tensor | None = None
    same, calls, start = True, 0, time.monotonic()
    while calls < STRESS_CALLS:
        if calls >= STRESS_LEAST and time.monotonic() - start > STRESS_SECONDS:
            break
        out.fill_(torch.nan)
        subject.backend.run(subject.packed, x, routing, subject.params, out)
        calls += 1
        if first is None or not same_bits(first, out):
            verdict = subject.judge(case, out)
            if not verdict:
                reason = f"{case.name}, call {calls} of the same: {verdict.reason}"
                return Finding(False, replace(verdict, reason=reason), calls)
            same = same and first is None
            first = out.clone() if first is None else first
    kept = same_bits(x, case.x) and torch.equal(before.topk_ids, routing.topk_ids)
    if not (kept and same_bits(before.topk_weights, routing.topk_weights)):
        reason = f"{case.name}: it changed its activations or routing"
        return Finding(False, Verdict("wrong", reason, fault="input_untouched"), calls)
    return Finding(same, calls=calls)


def keeps_rows_apart(subject: Subject, case: Case) -> Finding:
    """Rows alone, half of the rows, and all in another order give the bits they had together."""
    count = len(case.x)
    device = case.x.device
    verdict, whole = subject.guarded(case)
    if not verdict:
        return Finding(None, verdict, 1)
    parts = [[0], [count // 2], [count - 1], list(range(count // 2)), list(reversed(range(count)))]
    parts = [part for part in parts if part]
    apart = True
    for done, part in enumerate(parts):
        index = torch.tensor(part, device=device)
        verdict, out = subject.guarded(case.rows(index))
        if not verdict:
            what = f"{len(part)} of {count} rows" if done + 1 < len(parts) else "another order"
            reason = f"{case.name}, {what}: {verdict.reason}"
            return Finding(False, replace(verdict, reason=reason), done + 2)
        apart = apart and same_bits(whole[index], out)
    return Finding(apart, calls=len(parts) + 1)


def graph_equals_eager(subject: Subject, case: Case) -> Finding:
    """A captured call, replayed on other activations, gives the bits of the plain call on them."""
    if case.x.device.type != "cuda":
        return Finding(None)
    x, routing = case.x.clone(), subject.local(case)
    out = torch.full_like(x, torch.nan)

    def call() -> None:
        subject.backend.run(subject.packed, x, routing, subject.params, out)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize()
        return Finding(None, calls=4)  # it cannot be captured, so there is no replay to be wrong
    backwards = torch.arange(len(x) - 1, -1, -1, device=x.device)
    for shown in (case, case.rows(backwards)):
        local = subject.local(shown)
        x.copy_(shown.x)
        routing.topk_ids.copy_(local.topk_ids)
        routing.topk_weights.copy_(local.topk_weights)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        verdict = subject.judge(shown, out)
        if not verdict:
            reason = f"{case.name}, replayed from a graph: {verdict.reason}"
            return Finding(False, replace(verdict, reason=reason), 8)
        replayed = out.clone()
        out.fill_(torch.nan)
        call()
        torch.cuda.synchronize()
        if not same_bits(replayed, out):
            return Finding(False, calls=8)
    return Finding(True, calls=8)


def unpacks_exactly(
    layout: Layout, packed: PackedExperts, experts: CanonicalExperts
) -> bool | None:
    """Whether the packed copy gives back every bit of the weights; None where it cannot say.

    Scales and biases that the layout keeps in the act dtype (``meta["rounded"]``) come back rounded
    to it, all else exactly.
    """
    if not layout.invertible:
        return None
    try:
        back = layout.unpack(packed)
    except Exception:  # it does not say; what is packed is judged by what it computes
        return None
    tolerance = 2.0**-7 if packed.meta.get("rounded") else 0.0

    def same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
        mine = mine.to(theirs.device)
        if tolerance and theirs.is_floating_point():
            return torch.allclose(mine.double(), theirs.double(), rtol=tolerance, atol=0.0)
        return torch.equal(mine, theirs)

    return all(
        mine.keys() == theirs.keys() and all(same(mine[name], theirs[name]) for name in mine)
        for mine, theirs in (
            (back.w13.tensors, experts.w13.tensors),
            (back.w2.tensors, experts.w2.tensors),
        )
    )
