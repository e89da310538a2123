"""Where to start and what to try: parameters of a layer call, by tokens per expert.

The starting points are what won on an H200 (``results/nvidia-h200``: few tokens over 13 layers,
more over five). The regime is a matter of slots (tokens x top_k) and of how they share experts:

    decode   few slots, most with an expert of their own: two launches, no grouping, an expert is
             read for each of its slots
    scan     up to 32 slots: programs find their tokens themselves
    sorted   more: one alignment for all; Gluon GEMMs where they apply (sm_90, SiLU, no bias),
             plain Triton otherwise
"""

from __future__ import annotations

from typing import Any

from autosel.kernels.wna16_layer import TiledLayer, block_of, next_power_of_two, widest

Params = dict[str, Any]
HELD_WORDS = 160  # of the 255 registers a thread can have
SHARED_MEMORY = 227 << 10  # bytes a program can have on sm_90


def _names(prefix: str, **values: Any) -> Params:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def _largest(k: int, *options: int) -> int:
    """The first option that divides k."""
    return next((o for o in options if k % o == 0), options[-1])


# ------------------------------------------------------------------ which kernels apply
def gluon_layer(layer: TiledLayer) -> bool:
    """The Gluon GEMM has no bias, and knows SiLU(gate) * up."""
    plain = layer.activation == "silu" and layer.gated and not layer.limit
    return layer.gluon and layer.asm and plain and "b13" not in layer.tensors


def _ring_fits(k: int, group: int, bk: int, stages: int) -> bool:
    """Whole steps cover K, at least a round of them, and rounds do not cut groups."""
    span = bk * stages
    return k % bk == 0 and k >= span and (span % group == 0 or group % span == 0)


def _ring(k: int, group: int) -> tuple[int, int]:
    """Inputs of a step and steps of a round for a stream of weights: few steps, none of zeros
    where that can be had."""
    for bk, stages in ((128, 4), (64, 4), (64, 6)):
        if k % (bk * stages) == 0 and _ring_fits(k, group, bk, stages):
            return bk, stages
    return 64, 4


def gluon_gemm(layer: TiledLayer, up: bool) -> bool:
    gemm = layer.gemm(up)
    return gluon_layer(layer) and _ring_fits(gemm["K"], gemm["GROUP"], 64, 4)


# ------------------------------------------------------------------ starting points
_DECODE = frozenset(
    f"{pre}_{name}" for pre in ("up", "down") for name in ("r", "ks", "kw", "sub", "stages")
) | {"down_warps"}
_GEMMS = frozenset(
    f"{pre}_{name}" for pre in ("up", "down") for name in ("bn", "bk", "stages", "warps", "with")
) | {"prefetch"}


def is_complete(p: Params) -> bool:
    """Whether a setting leaves nothing to the starting point, which need not be made then: that
    takes 6 to 28 us of a call, and some layers take the device 10."""
    if p.get("path") == "decode":
        return p.keys() >= _DECODE
    if p.get("path") not in ("scan", "sorted") or not p.keys() >= _GEMMS:
        return False
    widths = "tok" in p or "classes" in p
    kinds = {"up": p["up_with"], "down": p["down_with"]}
    gluon = [pre for pre, kind in kinds.items() if kind == "gluon"]
    ring = not gluon or {"near", "classes", *(f"{pre}_late" for pre in gluon)} <= p.keys()
    return widths and ring and (kinds["down"] == "triton" or "down_rt" in p)


def starting_params(layer: TiledLayer, tokens: int, share: float = 1.0) -> Params:
    """What the kernels do by themselves."""
    return starting_points(layer, tokens, share)[0]


def starting_points(layer: TiledLayer, tokens: int, share: float = 1.0) -> list[Params]:
    """The starting point of each path that may be fastest, that of uniform routing first.

    Which one is depends on how many slots share experts: tokens are often more alike than uniform
    routing has them (8 tokens of Qwen3-30B, decode against sorted: 44 and 46 us; all on the same
    experts 40 and 23).

    share  of all experts that are here (expert parallelism): so many of the slots have work
    """
    slots = tokens * layer.top_k
    served = slots * share
    mean = served / layer.experts
    if tokens == 1 or served > 128:
        return [_decode(layer, served) if tokens == 1 else _sorted(layer, mean)]
    chosen = min(1.0, layer.top_k * share / layer.experts)  # by a token, if routing is uniform
    apart = layer.experts * (1 - (1 - chosen) ** tokens) / served  # experts hit, for each slot
    ways = {"decode": apart > 0.6, "scan": slots <= 64, "sorted": tokens > 2}
    if served <= 80 and apart > 0.82:
        first = "decode"
    elif slots <= 32 and (served < layer.experts or (layer.experts <= 16 and slots <= 16)):
        first = "scan"
    else:
        first = "sorted"
    make = {
        "decode": lambda: _decode(layer, served),
        "scan": lambda: _scan(layer),
        "sorted": lambda: _sorted(layer, mean),
    }
    return [make[first](), *(make[way]() for way, may in ways.items() if may and way != first)]


def _decode(layer: TiledLayer, slots: float) -> Params:
    """From whole grids of settings (``bench.few_tokens``)."""
    k, inner = layer.hidden, layer.intermediate
    rounds = slots * layer.rows13 / 16 / (132 * 8)  # of the programs that run at once
    if layer.group13 < 128:
        ks, kw, stages = (4, 64, 0) if rounds <= 0.4 else (2, 512, 3)
    elif k <= 3072:  # short programs, all of their loads at once
        ks, kw, stages = 4 if k <= 2048 and rounds <= 1 else 2, 256, 0
    elif rounds <= 1 or inner <= 512 or (k > 4096 and rounds <= 2):
        ks, kw, stages = 4, 256, 0
    else:  # a program holds its place while it waits: long streams in a pipeline
        ks, kw, stages = (4, 512, 3) if rounds <= 3 else (2, 256, 3)
    up = _pieces("up", k, ks, kw, stages)
    # Choices and pieces of K are the batch: few choices need pieces, or else long steps.
    if inner <= 1024:
        ks, kw, stages = 1, 128 if inner > 512 else 64, 0
        if (layer.group2 < 128 and slots > 16) or (inner >= 512 and slots >= 64):
            kw, stages = 64, 3
    elif inner < 2048:
        ks, kw, stages = 2 if slots <= 16 else 1, 256 if inner % 256 == 0 else 64, 3
    elif inner < 4096:
        ks, kw, stages = 4, 64, 0
    else:
        ks, kw, stages = (2, 256, 3) if inner < 8192 else (4, 512, 3)
    down = _pieces("down", inner, ks, kw, stages) | {"down_warps": 4}
    if layer.bits13 == 8:  # twice the words
        up |= {"up_kw": min(up["up_kw"], 128 if k <= 3072 else 256), "up_stages": 3}
        up["up_sub"] = min(up["up_kw"], 128)
    if layer.bits2 == 8:
        kw = 256 if inner <= 1024 and inner % 256 == 0 else down["down_kw"]
        down |= {"down_kw": kw, "down_sub": 64, "down_stages": 3}
    params: Params = {"path": "decode"} | up | down
    for pre in ("up", "down"):
        if params[f"{pre}_stages"] == 0 and _held_words(layer, pre, params) > HELD_WORDS:
            params[f"{pre}_stages"] = 3
    return params


def _scan(layer: TiledLayer) -> Params:
    scan = {"path": "scan", "tok": 16, "prefetch": _prefetch(layer)} | _triton(layer, 16, True)
    if layer.intermediate >= 2048 and layer.intermediate % 256 == 0 and layer.bits2 == 4:
        scan |= _names("down", bn=64, bk=256, stages=3) | {"prefetch": 0}
    return scan


def _pieces(pre: str, k: int, ks: int, kw: int, stages: int) -> Params:
    """``ks`` warps' pieces of K in steps of at most ``kw``, as far as K can be divided so."""
    while k % (64 * ks):
        ks //= 2
    while (k // ks) % kw:
        kw //= 2
    return _names(pre, r=1, ks=ks, kw=kw, sub=min(kw, 128), stages=stages)


def _held_words(layer: TiledLayer, pre: str, p: Params) -> int:
    """Registers of weights a thread holds when all of them are loaded before the first product."""
    gemm, ks = layer.gemm(pre == "up"), p[f"{pre}_ks"]
    choices = 1 if pre == "up" else next_power_of_two(layer.top_k)
    batches = choices if pre == "up" else -(-choices // max(1, p["down_warps"] // ks))
    return int(gemm["K"] // ks * p[f"{pre}_r"] * gemm["BITS"] // 64 * batches)


def _prefetch(layer: TiledLayer) -> int:
    return 256 if layer.intermediate % 256 == 0 else 0


def _triton(layer: TiledLayer, tok: int, scan: bool) -> Params:
    """Both GEMMs in plain Triton."""
    out: Params = {}
    for up, pre in ((True, "up"), (False, "down")):
        gemm = layer.gemm(up)
        bn = 128 if gemm["NR"] % 128 == 0 and not (scan and up) else 64
        bk = 128 if gemm["K"] % 128 == 0 and gemm["BITS"] == 4 else 64
        out |= _names(pre, bn=bn, bk=bk, stages=4 if tok <= 32 else 3, warps=4, regs=0)
        out[f"{pre}_with"] = "triton"
    if layer.intermediate <= 256 and layer.intermediate in (64, 128, 256) and tok <= 64:
        out |= _rows(layer)
    return out


def _rows(layer: TiledLayer) -> Params:
    rt = _largest(layer.hidden // 64, 28, 16, 8, 4, 2, 1)
    return {"down_with": "rows", "down_rt": rt} | _names(
        "down", bn=64, bk=64, stages=4, warps=4, regs=0
    )


def _sorted(layer: TiledLayer, mean: float) -> Params:
    """mean: slots per expert."""
    gluon = gluon_layer(layer) and (gluon_gemm(layer, True) or gluon_gemm(layer, False))
    if not gluon:
        tok = 16 if mean <= 8 else 32 if mean <= 24 else 64
        return {"path": "sorted", "tok": tok, "prefetch": _prefetch(layer)} | _triton(
            layer, tok, False
        )
    classes = _classes(mean, layer.experts)
    tok = widest(classes)
    base: Params = {
        "path": "sorted",
        "classes": classes,
        "near": 1 if tok <= 32 and layer.experts <= 16 else 4,
        "prefetch": _prefetch(layer),
    }
    if tok <= 32 and layer.hidden >= 7168 and layer.experts >= 256:
        base |= {"near": 8, "prefetch": 2 * base["prefetch"]}
    base |= _triton(layer, tok, False)
    for up, pre in ((True, "up"), (False, "down")):
        if not gluon_gemm(layer, up):
            continue
        k, group = layer.gemm(up)["K"], layer.gemm(up)["GROUP"]
        base[f"{pre}_with"] = "gluon"
        if tok <= 32:  # narrow blocks stream weights: small programs, long steps
            base |= _names(pre, **_narrow(layer, up, mean))
        else:
            late = 1 if group < 128 or (up and mean <= 70) else 0
            stages = 4 if k % 256 == 0 or k % 384 else 6  # no steps of zeros
            base |= _names(pre, bn=128, bk=64, stages=stages, warps=8, regs=128, late=late)
    if base["down_with"] == "gluon":
        base["down_rt"] = 1
        if layer.intermediate == 256:
            if 16 < mean <= 40:
                base |= _rows(layer)
            elif tok <= 32:
                seven = mean > 3 and layer.hidden % (64 * 7) == 0
                rt = 7 if seven else _largest(layer.hidden // 64, 4, 2, 1)
                base |= _names("down", bk=64, rt=rt)
                if mean <= 0.3 and layer.hidden % 1024 == 0:
                    base |= _names("down", bn=256, regs=128)
            elif layer.group2 < 128:
                base |= _names("down", regs=0, late=1, rt=_largest(layer.hidden // 128, 8, 4, 2, 1))
            else:
                rt = _largest(layer.hidden // 64, 4, 2, 1)
                base |= _names("down", bn=64, warps=4, regs=168, late=1, rt=rt)
    return base


def _narrow(layer: TiledLayer, up: bool, mean: float) -> Params:
    """Blocks of at most 32 tokens."""
    gemm = layer.gemm(up)
    bk, stages = _ring(gemm["K"], gemm["GROUP"])
    if up and layer.hidden >= 7168 and mean <= 0.3 and gemm["NR"] % 256 == 0:
        return {"bn": 256, "bk": bk, "stages": stages, "warps": 16, "regs": 0, "late": 0}
    tall = up and not 1 <= mean <= 3
    regs = 0 if tall else 168
    if gemm["BITS"] == 8 or not gemm["SYM"]:  # more registers for unpacking: shorter steps
        bk, stages = (64, stages) if tall else (bk, 6 if gemm["BITS"] == 8 else stages)
        regs = 168
        if not _ring_fits(gemm["K"], gemm["GROUP"], bk, stages):
            bk, stages = _ring(gemm["K"], gemm["GROUP"])
    late = 0 if up and layer.hidden >= 5120 else 1
    bn = 128 if tall else 64
    return {"bn": bn, "bk": bk, "stages": stages, "warps": 4, "regs": regs, "late": late}


#: Widths that a block of tokens may take, the widest last; from few slots an expert to many.
CLASSES = (
    "8",
    "8,16",
    "16,32",
    "32,32+16,64",
    "64,64+16,64+32,128",
    "64+16,64+32,128",
    "32,64,64+32,128",
)


def _classes(mean: float, experts: int) -> str:
    if mean <= 3:
        return CLASSES[0]
    if mean <= 10 and experts > 16:
        return CLASSES[1]
    if mean <= 30:
        return CLASSES[2]
    if mean <= 40:
        return CLASSES[3]
    return CLASSES[4] if mean <= 70 else CLASSES[5] if mean <= 110 else CLASSES[6]


# ------------------------------------------------------------------ choices and constraints
def choices(layer: TiledLayer, start: Params) -> dict[str, tuple[Any, ...]]:
    """What to vary around a starting point; :func:`problem_with` says which points are legal."""
    if start["path"] == "decode":
        return {
            "up_r": (1, 2),
            "up_ks": (1, 2, 4, 8),
            "up_kw": (64, 128, 256, 512),
            "up_sub": (64, 128, 256),
            "up_stages": (0, 2, 3, 4),
            "down_ks": (1, 2, 4, 8),
            "down_kw": (64, 128, 256, 512),
            "down_sub": (64, 128, 256),
            "down_stages": (0, 2, 3),
            "down_warps": (4, 8),
        }
    out: dict[str, tuple[Any, ...]] = {"prefetch": (0, 256, 512)}
    if "classes" in start:
        out["near"] = (1, 2, 4, 8)
        at = CLASSES.index(start["classes"])
        out["classes"] = CLASSES[max(at - 1, 0) : at + 2]
    else:
        out["tok"] = (16, 32, 64)
    for pre in ("up", "down"):
        kind = start[f"{pre}_with"]
        if kind == "gluon":
            out |= _names(
                pre,
                bn=(64, 128, 256),
                bk=(64, 128),
                stages=(4, 6, 8),
                warps=(4, 8, 16),
                regs=(0, 128, 168),
                late=(0, 1),
            )
        elif kind == "rows":
            out |= _names(pre, bn=(64, 128), rt=(4, 7, 8, 14, 16, 28, 56), stages=(2, 3, 4))
        else:
            out |= _names(
                pre,
                bn=(64, 128),
                bk=(64, 128, 256),
                stages=(3, 4, 5, 6),
                warps=(4, 8),
                regs=(0, 128),
            )
    if start.get("down_with") == "gluon" and start["down_rt"] > 1:
        out["down_rt"] = (2, 4, 7, 8, 14)
    return out


def blocks(choices: dict[str, tuple[Any, ...]]) -> tuple[tuple[str, ...], ...]:
    """Parameters of each GEMM's kernel, then those of both."""
    up, down = (tuple(n for n in choices if n.startswith(pre)) for pre in ("up_", "down_"))
    return up, down, tuple(n for n in choices if n not in (*up, *down))


def problem_with(layer: TiledLayer, p: Params) -> tuple[str, str, str] | None:
    """Why a point is illegal, as (what, found, required); known before anything is compiled."""
    for up, pre in ((True, "up"), (False, "down")):
        gemm = layer.gemm(up)
        found = (
            _decode_problem(layer, gemm, pre, p)
            if p["path"] == "decode"
            else _gemm_problem(gemm, pre, p)
        )
        if found:
            return found
    return None


def _decode_problem(
    layer: TiledLayer, gemm: Params, pre: str, p: Params
) -> tuple[str, str, str] | None:
    k, group = gemm["K"], gemm["GROUP"]
    ks, kw, sub, stages = (p[f"{pre}_{n}"] for n in ("ks", "kw", "sub", "stages"))
    if kw & (kw - 1) or ks & (ks - 1):
        return f"{pre}_ks, {pre}_kw", f"{ks}, {kw}", "powers of two"
    if k % (ks * kw):
        return f"{pre}_ks x {pre}_kw", str(ks * kw), f"a divisor of {k}"
    if kw % sub or (kw % group and group % kw):
        return f"{pre}_kw", str(kw), f"a multiple of {pre}_sub, and of the group or inside it"
    if pre == "down":
        # On an H200 eight warps on one product of 16 rows gave garbage (Triton 3.6; four did not).
        tiles = next_power_of_two(layer.top_k) * ks * (kw // sub) * p["down_r"]
        if p["down_warps"] > 4 * tiles:
            return "down_warps", str(p["down_warps"]), f"at most {4 * tiles}, 4 for each product"
    if gemm["NR"] % (16 * p[f"{pre}_r"]):
        return f"{pre}_r", str(p[f"{pre}_r"]), f"16 x {pre}_r divides {gemm['NR']}"
    words = _held_words(layer, pre, p)
    if stages == 0 and words > HELD_WORDS:
        return f"{pre}_stages", "0", f"a pipeline: {words} registers of weights a thread"
    return None


def _gemm_problem(gemm: Params, pre: str, p: Params) -> tuple[str, str, str] | None:
    k, rows, group, bits = gemm["K"], gemm["NR"], gemm["GROUP"], gemm["BITS"]
    kind = p[f"{pre}_with"]
    bn, rt = p[f"{pre}_bn"], p.get(f"{pre}_rt", 1) if pre == "down" else 1
    bk = k if kind == "rows" else p[f"{pre}_bk"]
    stages, tok = p[f"{pre}_stages"], block_of(p)
    if bn & (bn - 1) or bk & (bk - 1):
        return f"{pre}_bn, {pre}_bk", f"{bn}, {bk}", "powers of two"
    if rows % (bn * rt):
        return f"{pre}_bn x rows", str(bn * rt), f"a divisor of {rows}"
    if k % bk or (bk % group and group % bk):
        return f"{pre}_bk", str(bk), f"a divisor of {k}, and of the group or its multiple"
    warps = p[f"{pre}_warps"]
    held = tok if kind == "rows" else tok * stages
    pairs = bn * max(1, bk // group) * (2 if gemm["SYM"] else 4)  # scales, zero points
    nbytes = held * bk * 2 + stages * (bn * bk * bits // 8 + pairs)
    if kind == "gluon":
        if rt > 1 and stages * bk != k:
            return f"{pre}_stages x {pre}_bk", str(stages * bk), f"{k}, to keep the tokens"
        if rt == 1 and not _ring_fits(k, group, bk, stages):
            return f"{pre}_stages x {pre}_bk", str(stages * bk), f"at most {k}, whole groups"
        if bn // 16 < warps or warps * 64 > max(bn * 8, 256):
            return f"{pre}_warps", str(warps), f"at most one a 16-row tile of {bn}"
        accumulators = bn * tok // (warps * 32)
        if accumulators > 160:
            return f"{pre}_warps", str(warps), f"{accumulators} accumulators a thread at most 160"
        cap = p[f"{pre}_regs"]
        if cap and accumulators + 48 > cap:
            return f"{pre}_regs", str(cap), f"room for {accumulators} accumulators and 48 more"
    if nbytes > SHARED_MEMORY:
        return f"{pre} shared memory", f"{nbytes} bytes", f"at most {SHARED_MEMORY} bytes"
    return None
