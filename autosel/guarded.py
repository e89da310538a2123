"""One call of a candidate, watched: what it computes and what it touches besides."""

from __future__ import annotations

import torch

from autosel.compare import Verdict, compare_judged
from autosel.core import AccuracyClass, Params, Problem, Routing
from autosel.dispatch import apply
from autosel.errors import AutoselError, field_error
from autosel.interfaces import Backend, PackedExperts
from autosel.verify_cases import Case

#: Elements before and after the output that must not change; a multiple of any alignment.
GUARD = 4096

#: A quiet NaN with a payload of our own, by element size: a NaN that a kernel computes has
#: another one, so what was never written can be told from what was computed wrongly.
_UNWRITTEN = {2: (torch.int16, 0x7FDA), 4: (torch.int32, 0x7FDA5A5A)}


def run_guarded(
    backend: Backend, packed: PackedExperts, params: Params, case: Case, accuracy: AccuracyClass
) -> tuple[Verdict, torch.Tensor]:
    """Judge one call that gets copies of the inputs and an output full of NaN between guards.

    The verdict's ``fault`` names the property that a side effect breaks.
    """
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
        return Verdict("oom", first_line(error)), out
    except AutoselError as error:
        return Verdict("failed", str(error)), out
    except Exception as error:  # a third party's kernel may raise anything
        return Verdict("failed", f"{type(error).__name__}: {first_line(error)}"), out
    verdict = _side_effects(case.x, x, guarded)
    if verdict is None:  # a fault is falsy
        verdict = _unwritten(out)
    if verdict is None:
        act_dtype = packed.problem.act_dtype
        verdict = compare_judged(out, case.judged, accuracy=accuracy, act_dtype=act_dtype)
    return verdict, out


def _side_effects(original: torch.Tensor, x: torch.Tensor, guarded: torch.Tensor) -> Verdict | None:
    if not same_bits(original, x):
        return Verdict("wrong", "it changed its input x", fault="input_untouched")
    guards = torch.cat([guarded[:GUARD], guarded[len(guarded) - GUARD :]])
    stray = int((_bits(guards) != _unwritten_word(guards)).sum())
    if stray:
        reason = field_error("output", "writes outside it", f"{stray} elements", "none")
        return Verdict("wrong", reason, fault="writes_in_bounds")
    return None


def _unwritten(out: torch.Tensor) -> Verdict | None:
    missing = _bits(out) == _unwritten_word(out)  # [M, H]
    count = int(missing.sum())
    if not count:
        return None
    row, column = (int(i) for i in missing.nonzero()[0])
    found = f"{count} of {out.numel()} left, first at token {row} output {column}"
    reason = field_error("output", "unwritten elements", found, "none")
    return Verdict("wrong", reason, fault="output_fully_written")


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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
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


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
