"""Settings of the grouped GEMMs (``moe_grouped``, ``moe_prefill``), whose columns are found by
scanning the slots or lie sorted: where to start, what to try, what is legal."""

from __future__ import annotations

from typing import Any

from autosel.kernels.wna16_layer import TiledLayer, block_of, widest

Params = dict[str, Any]
SHARED_MEMORY = 227 << 10  # bytes a program can have on sm_90
_NAMES = frozenset(
    f"{pre}_{name}" for pre in ("up", "down") for name in ("bn", "bk", "stages", "warps", "with")
) | {"prefetch"}


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
def scan_start(layer: TiledLayer) -> Params:
    scan = {"path": "scan", "tok": 16, "prefetch": _prefetch(layer)} | _triton(layer, 16, True)
    if layer.intermediate >= 2048 and layer.intermediate % 256 == 0 and layer.bits2 == 4:
        scan |= _names("down", bn=64, bk=256, stages=3) | {"prefetch": 0}
    return scan


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


def sorted_start(layer: TiledLayer, mean: float) -> Params:
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
def says_all(p: Params) -> bool:
    """Whether a setting has every name that a call reads."""
    if not p.keys() >= _NAMES:
        return False
    widths = "tok" in p or "classes" in p
    kinds = {"up": p["up_with"], "down": p["down_with"]}
    gluon = [pre for pre, kind in kinds.items() if kind == "gluon"]
    ring = not gluon or {"near", "classes", *(f"{pre}_late" for pre in gluon)} <= p.keys()
    return widths and ring and (kinds["down"] == "triton" or "down_rt" in p)


def gemm_choices(start: Params) -> dict[str, tuple[Any, ...]]:
    """What to vary around a starting point."""
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


def gemm_problem(gemm: Params, pre: str, p: Params) -> tuple[str, str, str] | None:
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
