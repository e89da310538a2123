"""The plain kernel compiles for real GPUs, without one, and fits the shared memory asked for.

In a process of its own: in this one Triton may be the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from autosel.core import ACTIVATIONS

pytestmark = pytest.mark.slow

CASES = {
    "sm_90": (("cuda", 90, 32), {}),
    "sm_80": (("cuda", 80, 32), {}),
    "gfx942": (("hip", "gfx942", 64), {}),
    "asymmetric with bias": (("cuda", 90, 32), {"zeros": True, "bias": True}),
    "act-order": (("cuda", 90, 32), {"act_order": True}),
    "8 bit": (("cuda", 90, 32), {"bits": 8, "group": 32}),
    "large blocks": (("cuda", 90, 32), {"m": 64, "n": 128, "k": 128, "group": 32}),
    "fp32": (("cuda", 90, 32), {"dtype": "fp32", "group": 64}),
    "odd sizes": (("cuda", 90, 32), {"K": 100, "N": 36, "group": 100, "k": 32}),
}

#: The activation kernel for every activation, in one process.
ACTIVATION_SCRIPT = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from autosel.backends._steps import activation_constants
from autosel.core import ACTIVATIONS, Activation
from autosel.kernels.moe_wna16_plain import activation_kernel as kernel

built = {}
for name in ACTIVATIONS:
    extra = {"swigluoai_uninterleave": {"limit": 7.0}, "situ": {"beta": 1.0}}.get(name, {})
    activation = Activation(name, **extra)
    constants = {"N": 1536, "GATED": activation.gated, "BLOCK": 1024,
                 **activation_constants(activation)}
    names = kernel.arg_names
    signature = {n: {"h_ptr": "*bf16", "out_ptr": "*bf16"}.get(n, "constexpr") for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, values, {})
    built[name] = sorted(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
print(json.dumps(built))
"""

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from autosel.kernels.moe_wna16_plain import moe_gemm_kernel as kernel

target, o = json.loads(sys.argv[1])
o = {"zeros": False, "bias": False, "act_order": False, "bits": 4, "group": 128, "dtype": "bf16",
     "m": 16, "n": 64, "k": 64, "K": 2048, "N": 1536, **o}
types = {
    "a_ptr": "*" + o["dtype"], "b_ptr": "*u8", "c_ptr": "*" + o["dtype"], "scales_ptr": "*bf16",
    "weights_ptr": "*fp32", "sorted_ids_ptr": "*i32", "expert_ids_ptr": "*i32",
    "num_padded_ptr": "*i32", "num_slots": "i32", "num_blocks_m": "i32",
}
constants = {
    "N": o["N"], "K": o["K"], "G": o["K"] // o["group"], "GROUP": o["group"], "TOP_K": 8,
    "BITS": o["bits"], "ZERO": 1 << (o["bits"] - 1), "HAS_ZEROS": o["zeros"],
    "HAS_BIAS": o["bias"], "ACT_ORDER": o["act_order"], "WEIGHT_INPUT": False,
    "WEIGHT_OUTPUT": True, "BLOCK_M": o["m"], "BLOCK_N": o["n"], "BLOCK_K": o["k"], "GROUP_M": 8,
    "FP32_DOT": o["dtype"] == "fp32",
}
for name, there, kind in (("zeros_ptr", o["zeros"], "*u8"), ("bias_ptr", o["bias"], "*fp32"),
                          ("g_idx_ptr", o["act_order"], "*i32")):
    if there:
        types[name] = kind
    else:
        constants[name] = None
names = kernel.arg_names
signature = {name: types.get(name, "constexpr") for name in names}
values = {(names.index(name),): value for name, value in constants.items()}
aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t[0] == "*"}
source = ASTSource(kernel, signature, values, aligned)
options = {"num_warps": 4, "num_stages": 3}
built = triton.compile(source, target=GPUTarget(*target), options=options)
print(json.dumps({"shared": built.metadata.shared, "stages": sorted(built.asm)}))
"""


ROWS_SCRIPT = """
import json
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from autosel.kernels.row_int8 import quantize_rows_kernel as kernel

built = {}
for dtype in ("bf16", "fp16"):
    types = {"x_ptr": "*" + dtype, "q_ptr": "*i8", "scale_ptr": "*fp32", "factor": "fp32"}
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    values = {(names.index("N"),): 7168, (names.index("BLOCK"),): 8192}
    source = ASTSource(kernel, signature, values, {})
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm
    built[dtype] = sorted(asm)
print(json.dumps(built))
"""


def compiled(script: str, *arguments: str) -> Any:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=env, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


def test_every_activation_compiles() -> None:
    built = compiled(ACTIVATION_SCRIPT)
    assert set(built) == set(ACTIVATIONS)
    assert all("cubin" in stages for stages in built.values())


def test_int8_rows_compile() -> None:
    assert all("cubin" in stages for stages in compiled(ROWS_SCRIPT).values())


@pytest.mark.parametrize("case", CASES)
def test_compiles(case: str) -> None:
    target, options = CASES[case]
    result = compiled(SCRIPT, json.dumps([target, options]))
    assert {"cubin", "hsaco"} & set(result["stages"])
    if options.get("act_order"):
        return  # the gathered scales are staged too, which the estimate leaves out
    from autosel.backends.triton import shared_memory
    from tests.layouts import make

    act = {"fp32": "float32"}.get(options.get("dtype", ""), "bfloat16")
    problem = make.problem(bits=options.get("bits", 4), act_dtype=act)
    params = {"BLOCK_SIZE_M": options.get("m", 16), "BLOCK_SIZE_N": options.get("n", 64),
              "BLOCK_SIZE_K": options.get("k", 64), "num_stages": 3}  # fmt: skip
    assert shared_memory(params, problem) >= result["shared"]
