"""The starting points compile for a Hopper GPU, without one; Gluon has no interpreter.

In a process of its own: in this one Triton may be the interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
import triton
from triton.backends.compiler import GPUTarget

class Driver:  # answers what compilation asks of a device
    utils = None
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device=0): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def launcher_cls(self, *args): return None

triton.runtime.driver.set_active(Driver())
from autosel.kernels.wna16_layer import TiledLayer
from autosel.kernels.wna16_moe import layer_launches
from autosel.kernels.wna16_space import starting_params

def build(sizes, scheme):
    experts, top_k, hidden, inner, group, tokens = sizes
    bits, symmetric, fp16 = scheme
    word = torch.empty(1, dtype=torch.int32, device="meta")
    tensors = dict.fromkeys(("w13", "s13", "z13", "w2", "s2", "z2"), word)
    layer = TiledLayer(tensors, experts, top_k, hidden, inner, group, group, bits13=bits,
                       bits2=bits, symmetric13=symmetric, symmetric2=symmetric, fp16=fp16)
    dtype = torch.float16 if fp16 else torch.bfloat16
    x = torch.empty((tokens, hidden), dtype=dtype, device="meta")
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device="meta")
    weights = torch.empty((tokens, top_k), device="meta")
    built = {}
    for launch in layer_launches(layer, x, ids, weights, x, starting_params(layer, tokens)):
        compiled = launch.kernel.warmup(*launch.signature(), grid=(1,), **launch.options)
        ptx = compiled.asm["ptx"]
        name = launch.kernel.fn.__name__ + ("" if launch.options.get("UP", True) else " down")
        built[name] = {"wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"),
                       "shared": compiled.metadata.shared}
    return built

print(json.dumps([build(*case) for case in json.loads(sys.argv[1])]))
"""

PLAIN = (4, True, False)  # bits, symmetric, fp16
CASES = {
    "decode": ((128, 8, 2048, 768, 128, 1), PLAIN, "decode_gate_up", "mma"),
    "scan": ((8, 2, 4096, 14336, 128, 4), PLAIN, "grouped_gemm", "wgmma"),
    "narrow blocks": ((128, 8, 2048, 768, 128, 64), PLAIN, "prefill_gemm", "wgmma"),
    "short K, groups of 32": ((384, 8, 7168, 256, 32, 4096), PLAIN, "prefill_gemm", "wgmma"),
    "last round is no whole one": (
        (128, 8, 4096, 1408, 128, 64), PLAIN, "prefill_gemm down", "wgmma"),
    "fp16": ((128, 8, 2048, 768, 128, 4096), (4, True, True), "prefill_gemm", "wgmma"),
    "zero points": ((8, 2, 4096, 14336, 128, 64), (4, False, False), "prefill_gemm", "wgmma"),
    "int8": ((256, 8, 3072, 384, 128, 512), (8, True, False), "prefill_gemm down", "wgmma"),
    "int8, zero points, fp16": (
        (128, 8, 2048, 768, 32, 64), (8, False, True), "prefill_gemm", "wgmma"),
}  # fmt: skip


def test_compiles_for_hopper(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            SCRIPT,
            json.dumps([case[:2] for case in CASES.values()]),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for (case, (*_, kernel, instruction)), built in zip(CASES.items(), found, strict=True):
        assert built[kernel][instruction] > 0, (case, "not on the tensor cores")
        assert all(k["shared"] <= 227 << 10 for k in built.values()), case
