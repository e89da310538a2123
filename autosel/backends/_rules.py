"""Support rules that several backends share; each records a reason with found and required."""

from __future__ import annotations

from collections.abc import Iterator

from autosel.activations import constants
from autosel.core import Activation, Device, Problem, QuantScheme
from autosel.errors import UnsupportedError
from autosel.interfaces import Requirements
from autosel.layouts._common import single_group


def gemms(problem: Problem) -> Iterator[tuple[str, QuantScheme, int, int]]:
    """``(name, scheme, outputs, inputs)`` of both GEMMs."""
    yield "w13", problem.w13, problem.w13_shape[1], problem.w13_shape[2]
    yield "w2", problem.w2, problem.w2_shape[1], problem.w2_shape[2]


def capability_at_least(needs: Requirements, device: Device, lowest: tuple[int, int]) -> bool:
    """A device that reports no number is unknown, which is not the same as too old."""
    required = f"{lowest[0]}.{lowest[1]} or newer"
    if device.capability is None:
        return needs.need(False, "compute capability", "not reported", required)
    major, minor = device.capability
    return needs.need(
        device.capability >= lowest, "compute capability", f"{major}.{minor}", required
    )


def activation(needs: Requirements, problem: Problem) -> None:
    """Every activation has a kernel of ours; a constant without a place in it is refused."""
    found = problem.activation
    try:
        values = constants(found)
    except UnsupportedError:
        needs.need(False, f"activation {found.name}", found.key, "constants that it has")
        return
    if found.name == "swiglustep":
        needs.one_of("activation swiglustep, limit", values["limit"], (7.0,))


def own_constants(needs: Requirements, problem: Problem, names: tuple[str, ...]) -> None:
    """For an operator that has activations ``names``, each with the function's own constants."""
    found = problem.activation
    if needs.one_of("activation", found.name, names):
        own = constants(Activation(found.name))
        values = constants(found)
        needs.need(values == own, "activation constants", values, own or "none")


def instruction_sets(needs: Requirements, device: Device, flags: tuple[str, ...]) -> None:
    """A CPU has all of ``flags``; about another device there is nothing to say."""
    if device.kind == "cpu":
        missing = [flag for flag in flags if flag not in device.flags]
        needs.need(not missing, "instruction sets", "no " + ", ".join(missing), ", ".join(flags))


def no_act_order(needs: Requirements, problem: Problem) -> None:
    for name, scheme, _, inputs in gemms(problem):
        needs.need(
            not scheme.has_g_idx or single_group(scheme, inputs),
            f"{name} act-order",
            "g_idx with several groups",
            "contiguous groups",
        )


def symmetric_int4(needs: Requirements, problem: Problem) -> None:
    for name, scheme, _, _ in gemms(problem):
        needs.one_of(f"{name} bits", scheme.num_bits, (4,))
        needs.need(scheme.symmetric, f"{name} zero points", "asymmetric", "symmetric")
