"""Layers and devices in words, for reports and figure captions."""

from __future__ import annotations

from autosel.core import Candidate, Decision, Device, Problem, QuantScheme, Rejected
from autosel.decide_words import TIED, UNSETTLED


def scheme_text(scheme: QuantScheme) -> str:
    """``int4 group 128 symmetric``; whole-channel groups and act-order are named."""
    group = "per channel" if scheme.group_size == -1 else f"group {scheme.group_size}"
    zeros = "symmetric" if scheme.symmetric else "asymmetric"
    order = ", act-order" if scheme.has_g_idx else ""
    return f"int{scheme.num_bits} {group} {zeros}{order}"


def quant_text(problem: Problem) -> str:
    """Both matrices' schemes, once when they are the same."""
    if problem.w13 == problem.w2:
        return scheme_text(problem.w13)
    return f"w13 {scheme_text(problem.w13)}, w2 {scheme_text(problem.w2)}"


def shape_text(problem: Problem) -> str:
    """``8 experts, top-2, hidden 4096, intermediate 14336``; names what only this rank holds."""
    local = problem.num_local_experts
    here = "" if local == problem.num_experts else f" ({local} on this rank)"
    plural = "" if problem.num_experts == 1 else "s"
    return (
        f"{problem.num_experts} expert{plural}{here}, top-{problem.top_k}, "
        f"hidden {problem.hidden_size}, intermediate {problem.intermediate_size}"
    )


def problem_text(problem: Problem) -> str:
    """Everything that a decision depends on, in one sentence without a full stop."""
    extras = [problem.activation.key, f"{problem.act_dtype} activations"]
    if problem.has_bias:
        extras.append("bias")
    if problem.router_weight_on_input:
        extras.append("router weight on the input")
    return f"{shape_text(problem)}; {quant_text(problem)}; " + ", ".join(extras)


def device_text(device: Device) -> str:
    """Kind, name, threads and driver, for a footer."""
    parts = [device.name or f"unnamed {device.kind} device"]
    if device.threads is not None:
        parts.append(f"{device.threads} thread{'' if device.threads == 1 else 's'}")
    if device.driver:
        parts.append(f"driver {device.driver}")
    return ", ".join(parts)


def versions_text(device: Device) -> str:
    """``torch 2.13.0, triton 3.7.1``."""
    return ", ".join(f"{package} {version}" for package, version in device.versions)


def open_rivals(decision: Decision) -> list[Candidate]:
    """Rivals of which the samples leave open whether they are as fast as the winner.

    Other settings of the winner's backend only where there is nobody else.
    """
    found = [r.candidate for r in _open(decision)]
    return [r for r in found if r.backend != decision.winner.backend] or found


def settled_text(decision: Decision) -> str:
    """Whether another run may choose another backend: ``yes``, ``no: tie`` or ``no: 2 too noisy``.

    A tie is a rival as fast as the winner; too noisy are rivals that look clearly slower but whose
    samples do not settle it. ``yes (settings tie)``: only other settings of the same backend are.
    """
    if not decision.tie:
        return "yes"
    found = _open(decision)
    rivals = [r for r in found if r.candidate.backend != decision.winner.backend]
    if found and not rivals:
        return "yes (settings tie)"
    noisy = sum(r.reason.startswith(UNSETTLED) for r in rivals)
    return f"no: {noisy} too noisy" if rivals and noisy == len(rivals) else "no: tie"


def is_settled(decision: Decision) -> bool:
    """Whether the samples leave no doubt about the backend."""
    return settled_text(decision).startswith("yes")


def _open(decision: Decision) -> list[Rejected]:
    return [r for r in decision.rejected if r.reason.startswith((TIED, UNSETTLED))]
