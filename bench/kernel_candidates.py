"""Which parameters the sweep tries: starting points of a cell, and variations of each GEMM."""

from __future__ import annotations

from typing import Any

from bench.moe_cases import Shape

Params = dict[str, Any]


def _fits_decode(params: Params, shape: Shape, pre: str) -> bool:
    k = shape.hidden if pre == "up" else shape.inner
    ks, kw, sub = (params[f"{pre}_{n}"] for n in ("ks", "kw", "sub"))
    return (k % (ks * kw) == 0 and kw % sub == 0 and kw >= shape.group) or kw % shape.group == 0


def _decode_half(pre: str, *values: int) -> Params:
    names = ("r", "ks", "kw", "sub", "stages") + (("warps",) if pre == "down" else ())
    return {f"{pre}_{n}": v for n, v in zip(names, values, strict=True)}


UP_DECODE = {
    2048: [
        (1, 4, 256, 128, 0),
        (1, 4, 512, 128, 0),
        (1, 4, 128, 128, 0),
        (1, 4, 256, 64, 0),
        (2, 4, 256, 128, 0),
        (1, 2, 256, 128, 0),
        (1, 4, 256, 256, 0),
        (1, 8, 128, 128, 0),
        (1, 4, 256, 128, 2),
        (1, 8, 256, 64, 0),
        (2, 2, 256, 128, 0),
    ],
    7168: [
        (1, 4, 256, 128, 0),
        (1, 4, 256, 128, 3),
        (1, 4, 256, 128, 2),
        (2, 4, 256, 128, 3),
        (1, 4, 256, 256, 3),
        (1, 4, 256, 64, 3),
        (1, 2, 512, 128, 2),
        (1, 2, 512, 128, 3),
        (1, 4, 256, 128, 4),
        (2, 4, 128, 128, 3),
        (2, 4, 128, 64, 4),
        (1, 2, 256, 128, 4),
    ],
    4096: [
        (1, 4, 256, 128, 3),
        (1, 4, 512, 128, 2),
        (1, 2, 512, 128, 3),
        (1, 4, 256, 256, 3),
        (2, 4, 512, 128, 2),
        (1, 4, 512, 128, 0),
        (2, 4, 128, 128, 4),
        (1, 4, 128, 128, 4),
        (2, 4, 256, 128, 3),
        (4, 4, 128, 128, 3),
        (2, 8, 128, 128, 4),
        (1, 4, 256, 128, 3),
        (4, 4, 128, 128, 4),
    ],
}
DOWN_DECODE = {
    768: [
        (1, 1, 256, 128, 0, 4),
        (1, 1, 256, 128, 0, 8),
        (1, 1, 256, 256, 0, 4),
        (1, 1, 256, 64, 0, 4),
        (1, 1, 128, 128, 0, 4),
        (1, 1, 256, 128, 0, 2),
    ],
    1536: [
        (1, 1, 256, 128, 0, 8),
        (1, 1, 512, 128, 0, 8),
        (1, 1, 256, 128, 3, 8),
        (1, 1, 512, 256, 0, 8),
        (1, 2, 256, 128, 0, 16),
        (1, 1, 128, 128, 4, 8),
    ],
    256: [
        (1, 1, 256, 128, 0, 4),
        (1, 1, 256, 64, 0, 4),
        (1, 1, 256, 256, 0, 4),
        (1, 1, 256, 128, 0, 2),
        (1, 1, 256, 256, 0, 2),
        (1, 1, 128, 128, 0, 4),
    ],
    14336: [
        (1, 4, 512, 128, 3, 8),
        (1, 4, 512, 128, 2, 8),
        (1, 4, 512, 256, 3, 8),
        (1, 2, 512, 128, 3, 4),
        (1, 8, 256, 128, 3, 16),
        (1, 2, 1024, 128, 2, 4),
    ],
}


def _both(**values: int) -> Params:
    """The same values for both GEMMs."""
    return {f"{half}_{name}": value for half in ("up", "down") for name, value in values.items()}


def _grouped(path: str, tok: int, shape: Shape, slots: int) -> list[Params]:
    base = {
        "path": path,
        "tok": tok,
        **_both(bn=128, bk=128, stages=4, warps=4, regs=0),
        "prefetch": 256,
        "up_with": "triton",
        "down_with": "triton",
    }
    out = [base]
    if shape.inner <= 256:
        out.append(base | {"down_with": "rows", "down_bn": 64, "down_rt": 28, "down_stages": 4})
    return out


def _prefill(tok: int, classes: str, shape: Shape, **more: Any) -> Params:
    base = {
        "path": "sorted",
        "up_with": "gluon",
        "down_with": "gluon",
        "tok": tok,
        "classes": classes,
        "near": 4,
        **_both(bn=128, bk=64, stages=4, warps=8, regs=128 if tok <= 128 else 0, late=1),
        "down_rt": 1,
    }
    if tok <= 32:  # narrow blocks: small programs, long steps
        base |= _both(bn=64, bk=128, stages=4, warps=4, regs=168, late=1)
        base["down_bk"] = 128 if shape.inner % 512 == 0 else 64
    if shape.inner == 256:
        base |= {"down_rt": 4}
    return base | more


def bases(shape: Shape, tokens: int) -> list[Params]:
    slots = tokens * shape.top_k
    mean = slots / shape.experts
    out: list[Params] = []
    if slots <= 32:
        up, down = UP_DECODE[shape.hidden], DOWN_DECODE[shape.inner]
        for u in up[:3]:
            out.append({"path": "decode"} | _decode_half("up", *u) | _decode_half("down", *down[0]))
    if slots <= 512:
        for tok in (16, 32) if mean > 6 else (16,):
            out += _grouped("scan", tok, shape, slots)
    if slots > 32:
        for tok in (16, 32, 64) if 12 < mean < 65 else (16, 32) if mean > 4 else (16,):
            if mean < 65:
                out += _grouped("sorted", tok, shape, slots)
    if slots > 32 or shape.experts <= 8:
        for tok, classes in _class_sets(mean):
            out.append(_prefill(tok, classes, shape))
    return out


def _class_sets(mean: float) -> list[tuple[int, str]]:
    if mean <= 10:
        return [(8, "8"), (16, "8,16"), (16, "16")]
    if mean <= 24:
        return [(32, "16,32"), (32, "16,16+8,32")]
    if mean <= 40:
        return [(32, "16,32"), (48, "32,32+16")]
    if mean <= 70:
        return [(128, "64,64+16,64+32,128"), (128, "64+8,64+16,64+32,128"), (96, "64,64+16,64+32")]
    if mean <= 100:
        return [(128, "64+16,64+32,128"), (96, "32,64,64+16,64+32")]
    if mean <= 160:
        return [(128, "32,64+32,128"), (128, "32,64,128"), (256, "64+32,128,128+16,256")]
    return [(128, "32,64,64+32,128"), (128, "32,64,128"), (256, "64,128,128+64,256")]


def variants(shape: Shape, tokens: int, base: Params, part: str | None = None) -> list[Params]:
    """Variations of one GEMM (or, for "all", of what both share) around base."""
    if part is None:
        return [v for p in ("up", "down", "all") for v in variants(shape, tokens, base, p)]
    path = base["path"]
    if path == "decode":
        if part == "all":
            return []
        table = UP_DECODE[shape.hidden] if part == "up" else DOWN_DECODE[shape.inner]
        return [base | _decode_half(part, *v) for v in table]
    pre = part + "_"
    if part == "all" and "gluon" in (base["up_with"], base["down_with"]):
        return [base | {"near": n} for n in (1, 2, 8) if n != base["near"]]
    if part != "all" and base[part + "_with"] == "gluon":
        return _prefill_variants(shape, base, part)
    if part == "all":
        return [base | {"prefetch": v} for v in (0, 512) if v <= shape.inner]
    if part == "down" and base["down_with"] == "rows":
        options = [(64, 14, 4), (64, 56, 4), (64, 28, 3), (128, 14, 3), (64, 16, 4), (64, 8, 4)]
        rows = shape.hidden
        return [
            base | {"down_bn": bn, "down_rt": rt, "down_stages": st}
            for bn, rt, st in options
            if rows % (bn * rt) == 0
        ]
    return [
        base | {pre + "bn": bn, pre + "bk": bk, pre + "stages": st, pre + "regs": regs}
        for bn, bk, st, regs in (
            (128, 128, 3, base[pre + "regs"]),
            (64, 128, 4, base[pre + "regs"]),
            (64, 128, 6, base[pre + "regs"]),
            (128, 64, 6, base[pre + "regs"]),
            (128, 128, 4, 0 if base[pre + "regs"] else 128),
            (64, 256, 3, base[pre + "regs"]),
            (128, 128, 5, base[pre + "regs"]),
        )
        if (shape.hidden if part == "up" else shape.inner) % bk == 0
    ]


def _prefill_variants(shape: Shape, base: Params, part: str) -> list[Params]:
    pre = part + "_"
    out = []
    k = shape.hidden if part == "up" else shape.inner
    names = ("bn", "bk", "stages", "warps", "regs", "late")
    options = [
        dict(zip(names, v, strict=True))
        for v in (
            (128, 64, 4, 8, 128, 1),
            (128, 64, 8, 8, 128, 0),
            (128, 64, 6, 8, 128, 1),
            (128, 128, 4, 8, 128, 0),
            (128, 128, 4, 8, 128, 1),
            (64, 64, 4, 4, 168, 1),
            (64, 128, 4, 4, 168, 1),
            (128, 128, 3, 8, 0, 1),
            (64, 64, 8, 4, 128, 0),
            (64, 128, 3, 4, 0, 1),
            (128, 128, 4, 4, 0, 1),
            (256, 64, 4, 8, 0, 0),
            (256, 64, 4, 16, 128, 0),
            (256, 64, 4, 8, 128, 0),
        )
    ]
    for o in options:
        o = {pre + n: v for n, v in o.items()}
        steps = k // o[pre + "bk"]
        if base["tok"] < 64 and o[pre + "bn"] == 256:
            continue
        if base["tok"] > 128 and (o[pre + "regs"] == 128 or o[pre + "bn"] == 256):
            continue
        if (2 * shape.inner if part == "up" else shape.hidden) % o[pre + "bn"]:
            continue
        if part == "down" and base["down_rt"] > 1:
            if steps != o[pre + "stages"]:
                continue
            for rt in (4, 14, 28):
                if shape.hidden % (o["down_bn"] * rt) == 0:
                    out.append(base | o | {"down_rt": rt})
        elif steps % o[pre + "stages"] == 0:
            out.append(base | o)
    if part == "down" and base["down_rt"] > 1:
        rows = {
            "down_with": "rows",
            "down_bn": 64,
            "down_rt": 28,
            "down_stages": 4,
            "down_warps": 4,
        }
        out += [base | rows | {"down_regs": 0}]
        for rt in (2, 7, 8, 14, 28):
            if shape.hidden % (base["down_bn"] * rt) == 0:
                out.append(base | {"down_rt": rt})
    return out
