"""The inline assembly of the kernels, run here word for word: every step is bit exact.

There is no GPU in most of the places where tests run, and Triton's interpreter has no inline
assembly. The dozen instructions that unpacking takes are few enough to be carried out by hand.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
from autosel.kernels import wna16_dequant

SCHEMES = list(itertools.product((4, 8), (True, False), (False, True)))
NAMES = [f"int{b}{'' if s else ', zero points'}, {'fp16' if f else 'bf16'}" for b, s, f in SCHEMES]


def text_of(function, *args):
    """PTX of a constexpr function."""
    return getattr(function, "fn", function)(*args)


def value(bits, fp16):
    """The number that 16 bits stand for."""
    half = torch.from_numpy(np.array([bits], dtype=np.uint16).view(np.int16))
    return half.view(torch.float16 if fp16 else torch.bfloat16).double().item()


def rounded(number, fp16):
    """The 16 bits nearest to a number, subnormal ones included."""
    half = torch.tensor([number], dtype=torch.float64).to(torch.float16 if fp16 else torch.bfloat16)
    return half.view(torch.int16).item() & 0xFFFF


def run(text, registers, fp16):
    """Carry out PTX on 32-bit registers by name; floats are pairs of 16 bits."""
    for line in filter(None, (part.strip() for part in text.strip("{}").split(";"))):
        op, rest = line.split(" ", 1)
        if op == ".reg":
            continue
        if halves := re.match(r"\{(\S+),(\S+)\}, (\S+)", rest):
            word = registers[halves[3]]
            registers[halves[1]], registers[halves[2]] = word & 0xFFFF, word >> 16
            continue
        target, *names = (name.strip() for name in rest.split(","))
        a = [registers[name] if name in registers else int(name, 0) for name in names]
        registers[target] = PAIRS[op.split(".")[0]](a, fp16) if "16x2" in op else WORDS[op](*a)


def permuted(a, b, pick):
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    return sum(source[pick >> 4 * i & 7] << 8 * i for i in range(4))


def and_or(a, b, c, table):
    assert table == 0xEA
    return a & b | c


WORDS = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": and_or,
    "prmt.b32": permuted,
}


def pairwise(combine):
    """A float instruction: computed in float64, where it is exact, and rounded once."""

    def on_pairs(words, fp16):
        low, high = (
            rounded(combine(*(value(word >> shift & 0xFFFF, fp16) for word in words)), fp16)
            for shift in (0, 16)
        )
        return low | high << 16

    return on_pairs


PAIRS = {
    "fma": pairwise(lambda a, b, c: a * b + c),
    "add": pairwise(lambda a, b: a + b),
    "mul": pairwise(lambda a, b: a * b),
}


def case(bits, symmetric, fp16, seed):
    """Scales, zero points and words, and what :func:`prepare` makes of the former."""
    rng = np.random.default_rng(seed)
    scales = [rounded(float(s), fp16) for s in rng.uniform(1e-3, 0.1, 2)]
    zeros = [1 << bits - 1] * 2 if symmetric else [int(z) for z in rng.integers(0, 1 << bits, 2)]
    registers = {"$4": scales[0] | scales[1] << 16, "$5": zeros[0] | zeros[1] << 16}
    run(text_of(wna16_dequant._prepare_asm, bits, symmetric, fp16), registers, fp16)
    prepared = [registers[f"${i}"] for i in range(4)]
    return int(rng.integers(0, 1 << 32)), scales, zeros, prepared


def weight(word, place, row, bits, scales, zeros, fp16):
    """What must come out: one rounding of (code - zero) * scale, times the accumulator's part."""
    code = word >> place & (1 << bits) - 1
    times = 1 / wna16_dequant.accumulator_scale.fn(fp16, True)
    return (code - zeros[row]) * value(scales[row], fp16) * times


def same(got, expected, fp16):
    """Equal bit for bit; a zero may have either sign."""
    return got == rounded(expected, fp16) or (expected == 0 and value(got, fp16) == 0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
def test_a_word_at_once(scheme):
    bits, _, fp16 = scheme
    count = 32 // bits
    text = text_of(wna16_dequant._word_asm, *scheme)
    places = [0, 16, 4, 20, 8, 24, 12, 28] if bits == 4 else [0, 16, 8, 24]
    for seed in range(40):
        word, scales, zeros, prepared = case(*scheme, seed)
        registers = dict(zip((f"${count + i}" for i in range(5)), (word, *prepared), strict=True))
        run(text, registers, fp16)
        for i, place in enumerate(places):
            expected = weight(word, place, i // 2 % 2, bits, scales, zeros, fp16)
            assert same(registers[f"${i}"], expected, fp16), (seed, place)


@pytest.mark.parametrize("scheme", SCHEMES, ids=NAMES)
def test_a_pair_at_a_time(scheme):
    bits, _, fp16 = scheme
    text = text_of(wna16_dequant._pair_asm, *scheme)
    for seed, row, second in itertools.product(range(40), (0, 1), (0, 1)):
        word, scales, zeros, (f0, f1, o0, o1) = case(*scheme, seed)
        shift, mask = (8 * row, 0x00FF00FF) if bits == 8 else (8 * second, 0x000F000F << 4 * row)
        registers = {
            "$1": word, "$3": shift, "$5": mask, "$7": (f0, f1)[row], "$9": (o0, o1)[row],
            "$11": (0x3C003C00, 0x2C002C00)[row],
        }  # fmt: skip
        run(text, registers, fp16)
        start = 8 * row if bits == 8 else 4 * row + 8 * second
        for high in (0, 1):
            expected = weight(word, start + 16 * high, row, bits, scales, zeros, fp16)
            got = registers["$0"] >> 16 * high & 0xFFFF
            assert same(got, expected, fp16), (seed, row, second, high)


def test_planted_fault_a_wrong_constant_is_seen(monkeypatch):
    scheme = (4, True, True)
    text = text_of(wna16_dequant._prepare_asm, *scheme)
    assert "0xd480d480" in text
    monkeypatch.setattr(
        wna16_dequant, "_prepare_asm", lambda *_: text.replace("0xd480d480", "0xd440d440")
    )
    with pytest.raises(AssertionError):
        test_a_word_at_once(scheme)
