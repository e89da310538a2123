"""Runs a candidate on the judged cases and watches what it does besides computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch

from autosel.audit import audit
from autosel.compare import AUDIT_LIMIT, LIMITS, Limits, Verdict, compare
from autosel.core import AccuracyClass, CanonicalExperts, ErrorFigures, Params, Problem, Routing
from autosel.dispatch import apply
from autosel.errors import AutoselError, field_error
from autosel.interfaces import Backend, PackedExperts
from autosel.verify_cases import TOKEN_COUNTS, Case, make_cases

__all__ = [
    "AUDIT_LIMIT",
    "LIMITS",
    "TOKEN_COUNTS",
    "Case",
    "Limits",
    "Verdict",
    "compare",
    "fingerprint",
    "make_cases",
    "verify_candidate",
]

#: Elements before and after the output that must not change; a multiple of any alignment.
GUARD = 4096

#: A quiet NaN with a payload of our own, by element size: a NaN that a kernel computes has
#: another one, so what was never written can be told from what was computed wrongly.
_UNWRITTEN = {2: (torch.int16, 0x7FDA), 4: (torch.int32, 0x7FDA5A5A)}


def verify_candidate(
    backend: Backend,
    packed: PackedExperts,
    params: Params,
    cases: Sequence[Case],
    *,
    experts: CanonicalExperts | None = None,
    accuracy: AccuracyClass | None = None,
    repeats: int = 2,
) -> Verdict:
    """Run every case ``repeats`` times and judge each output; the first fault ends it.

    Each run gets a copy of the activations and an output of its own, filled with NaN, between
    guards. Besides wrong numbers these are faults: an element not written, a write outside the
    output, a change of the activations or of the packed weights, an exception. The figures of
    an ok are the worst over all cases.

    experts   the weights that were packed: with them, the outputs of all cases together are also
              audited for single wrong weights (:mod:`autosel.audit`), one more pass over them
    accuracy  defaults to the class that the backend declares for ``params``
    """
    accuracy = backend.accuracy(params) if accuracy is None else accuracy
    before = {name: fingerprint(tensor) for name, tensor in packed.tensors.items()}
    verdict, outputs = _run_cases(backend, packed, params, cases, accuracy, repeats)
    if verdict and experts is not None:
        verdict = _audited(verdict, experts, cases, outputs, accuracy)
    changed = [name for name, t in packed.tensors.items() if fingerprint(t) != before[name]]
    if changed:
        reason = f"it changed its packed weights: {', '.join(changed)}"
        if verdict:
            verdict = replace(verdict, status="wrong", reason=reason)
        verdict = replace(verdict, weights_changed=True)
    return verdict


def _run_cases(
    backend: Backend,
    packed: PackedExperts,
    params: Params,
    cases: Sequence[Case],
    accuracy: AccuracyClass,
    repeats: int,
) -> tuple[Verdict, list[torch.Tensor]]:
    """The verdict over all cases, and the first output of each while they were right."""
    outputs: list[torch.Tensor] = []
    total = Verdict("ok", repeatable=None if repeats < 2 else True)
    for case in cases:
        for turn in range(repeats):
            verdict, out = _run_once(backend, packed, params, case, accuracy)
            if not verdict:
                done = tuple(c.name for c in cases[: len(outputs) + (turn == 0)])
                return replace(
                    verdict, reason=f"{case.name}: {verdict.reason}", cases=done
                ), outputs
            total = _worst(total, verdict)
            if turn == 0:
                outputs.append(out)
            elif not _same_bits(outputs[-1], out):
                total = replace(total, repeatable=False)
    return replace(total, cases=tuple(case.name for case in cases)), outputs


def _audited(
    verdict: Verdict,
    experts: CanonicalExperts,
    cases: Sequence[Case],
    outputs: Sequence[torch.Tensor],
    accuracy: AccuracyClass,
) -> Verdict:
    used = [(c, out) for c, out in zip(cases, outputs, strict=True) if c.independent]
    if not used:
        return verdict
    suspect = audit(
        torch.cat([c.x for c, _ in used]),
        experts,
        Routing(
            torch.cat([c.routing.topk_ids for c, _ in used]),
            torch.cat([c.routing.topk_weights for c, _ in used]),
        ),
        torch.cat([out.to(c.judged.reference.dtype) - c.judged.reference for c, out in used]),
        torch.cat([c.judged.scales[accuracy] for c, _ in used]),
        expert_map=used[0][0].expert_map,
        accuracy=accuracy,
        dtype=used[0][0].judged.reference.dtype,
    )
    if suspect is None:
        return verdict
    verdict = replace(verdict, audit_score=suspect.score)
    if not suspect.guilty:
        return verdict
    reason = field_error(
        f"audit: {suspect}",
        "evidence of a wrong weight",
        f"{suspect.score:.3g}",
        f"at most {AUDIT_LIMIT:g}",
    )
    return replace(verdict, status="wrong", reason=reason, score=suspect.score / AUDIT_LIMIT)


def _run_once(
    backend: Backend, packed: PackedExperts, params: Params, case: Case, accuracy: AccuracyClass
) -> tuple[Verdict, torch.Tensor]:
    x = case.x.clone()
    routing = Routing(case.routing.topk_ids.clone(), case.routing.topk_weights.clone())
    guarded = _filled(x.numel() + 2 * GUARD, x)
    out = guarded[GUARD : GUARD + x.numel()].view(x.shape)
    _poison_free_memory(x, packed.problem)
    try:
        apply(backend, packed, x, routing, params, expert_map=case.expert_map, out=out)
        if x.device.type != "cpu":
            torch.accelerator.synchronize(x.device)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Verdict("oom", _first_line(error)), out
    except AutoselError as error:
        return Verdict("failed", str(error)), out
    except Exception as error:  # a third party's kernel may raise anything
        return Verdict("failed", f"{type(error).__name__}: {_first_line(error)}"), out
    fault = _side_effects(case.x, x, guarded) or _unwritten(out)
    if fault:
        return Verdict("wrong", fault), out
    verdict = compare(
        out,
        case.judged.reference,
        accuracy=accuracy,
        act_dtype=packed.problem.act_dtype,
        scale=case.judged.scales[accuracy],
        overflows=case.judged.overflows,
    )
    return verdict, out


def _side_effects(original: torch.Tensor, x: torch.Tensor, guarded: torch.Tensor) -> str:
    if not _same_bits(original, x):
        return "it changed its input x"
    guards = torch.cat([guarded[:GUARD], guarded[len(guarded) - GUARD :]])
    stray = int((_bits(guards) != _unwritten_word(guards)).sum())
    if stray:
        return field_error("output", "writes outside it", f"{stray} elements", "none")
    return ""


def _unwritten(out: torch.Tensor) -> str:
    missing = _bits(out) == _unwritten_word(out)  # [M, H]
    count = int(missing.sum())
    if not count:
        return ""
    row, column = (int(i) for i in missing.nonzero()[0])
    found = f"{count} of {out.numel()} left, first at token {row} output {column}"
    return field_error("output", "unwritten elements", found, "none")


def _worst(total: Verdict, verdict: Verdict) -> Verdict:
    """``total`` with the larger of both scores and, figure by figure, the larger error."""
    if total.errors is None or verdict.errors is None:
        return replace(total, errors=verdict.errors or total.errors, score=verdict.score)
    figures = {
        item.name: max(
            (getattr(total.errors, item.name), getattr(verdict.errors, item.name)),
            # An undefined figure is one without a bound.
            key=lambda value: float("inf") if value is None else abs(value),
        )
        for item in fields(ErrorFigures)
    }
    score = max(total.score or 0.0, verdict.score or 0.0)
    return replace(total, errors=ErrorFigures(**figures), score=score)


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that changes with any element and with the exchange of any two.

    Each 32-bit word counts with its place, so that weights shuffled in place are seen too.
    """
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = flat.view(torch.int32) if flat.numel() % 4 == 0 and _aligned(flat) else flat
    place = 2 * torch.arange(min(len(words), _CHUNK), device=words.device) + 1
    found = 0
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        found = (found * _PRIME + int((chunk * place[: len(chunk)]).sum())) % _MODULUS
    return found


_CHUNK = 1 << 20
_PRIME = 0x100000001B3
_MODULUS = 1 << 64


def _aligned(flat: torch.Tensor) -> bool:
    return flat.storage_offset() % 4 == 0


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_UNWRITTEN[tensor.element_size()][0])


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality that tells -0 from 0 and knows a NaN as itself."""
    return torch.equal(_bits(a), _bits(b))


def _unwritten_word(tensor: torch.Tensor) -> int:
    return _UNWRITTEN[tensor.element_size()][1]


def _filled(count: int, like: torch.Tensor) -> torch.Tensor:
    """``[count]`` in the dtype of ``like``, every element the NaN that means unwritten."""
    integer, word = _UNWRITTEN[like.element_size()]
    return torch.full((count,), word, dtype=integer, device=like.device).view(like.dtype)


def _poison_free_memory(x: torch.Tensor, problem: Problem) -> None:
    """Leave NaN where the allocator is likely to take the candidate's workspace from."""
    width = max(problem.num_shards * problem.intermediate_size, problem.hidden_size)
    rows = len(x) * problem.top_k
    spent = [torch.full((rows, width), torch.nan, dtype=x.dtype, device=x.device) for _ in "ab"]
    del spent


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
