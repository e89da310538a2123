"""What is compiled ahead is what a call asks for: the plain kernel, and humming-kernels.

Compilation for another device turns this process's Triton into one that launches nothing, so each
such test has a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import registry
from autosel.backends import triton as plain
from autosel.core import Problem, QuantScheme
from autosel.sources import RandomSource
from tests.backends.adapters import H200

SYM = QuantScheme(4, 32, True, scale_dtype="bfloat16")
ASYM = QuantScheme(4, 32, False, scale_dtype="float16")
ORDER = QuantScheme(4, 32, True, has_g_idx=True, scale_dtype="float16")
WIDE = QuantScheme(8, -1, True, scale_dtype="float32")
LAYER = Problem(4, 4, 2, 128, 64, SYM, SYM)


@pytest.mark.parametrize("scheme", [SYM, ASYM, ORDER, WIDE], ids=["sym", "asym", "order", "8 bit"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tensors_without_contents_are_like_the_packed_ones(
    scheme: QuantScheme, has_bias: bool
) -> None:
    """Triton compiles for types, alignment and these constants; see Triton's JITFunction."""
    problem = replace(LAYER, w13=scheme, w2=scheme, has_bias=has_bias)
    layout = registry.get("triton").layout(problem, {})
    real = layout.pack(RandomSource(problem).load()).tensors
    made = plain._meta_packed(layout, problem).tensors
    assert {name: t.dtype for name, t in made.items()} == {
        name: t.dtype for name, t in real.items()
    }
    for name in ("w13_scales", "w2_scales"):
        assert made[name].shape[-1] == real[name].shape[-1]
    assert {t.device.type for t in made.values()} == {"meta"}
    assert all(t.data_ptr() % 16 == 0 for t in (*made.values(), *real.values()))


@pytest.mark.parametrize("path", ["decode", "scan", "sorted"])
def test_our_kernels_name_each_kernel_once(path: str) -> None:
    pytest.importorskip("triton")
    backend: Any = registry.get("wna16_tiled")
    scheme = QuantScheme(4, 128, True)
    problem = Problem(128, 128, 8, 2048, 768, scheme, scheme)
    spaces = [backend.space(problem, m, H200) for m in (1, 2, 64)]
    starts = [design.default for space in spaces for design in space.designs]
    params = next(start for start in starts if start["path"] == path)
    counts = (1, 2, 3, 6, 9, 16, 17, 32, 64, 128)
    named = backend.compiled_counts(problem, params, counts, H200)
    assert named[0] == 1
    if path == "scan":  # a kernel for each power of two of slots
        assert len(named) > 1
    else:
        assert named == (1,)


def run(script: str, tmp_path: Path, *arguments: str) -> Any:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, env=env, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


PLAIN = """
import json, os, sys
from pathlib import Path
from autosel import registry
from autosel.core import Problem, QuantScheme
from tests.backends.adapters import H200

backend, cache = registry.get("triton"), Path(os.environ["TRITON_CACHE_DIR"])
scheme = QuantScheme(4, 128, **json.loads(sys.argv[1]))
problem = Problem(128, 128, 8, 2048, 768, scheme, scheme, **json.loads(sys.argv[2]))
found = {}
for tokens in (1, 16, 32, 64):
    params = backend.space(problem, tokens, H200).default
    for count in (tokens, 2, 17, 64, 128):
        backend.compile_ahead(problem, params, count, H200)
        built = [p.stem for p in cache.rglob("*.cubin")]
        found[f"{tokens} {count}"] = {name: built.count(name) for name in set(built)}
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "layer"),
    [
        ({"symmetric": True, "scale_dtype": "bfloat16"}, {}),
        ({"symmetric": False, "scale_dtype": "float16"}, {"act_dtype": "float16"}),
        ({"symmetric": True, "has_g_idx": True}, {"has_bias": True}),
    ],
    ids=["symmetric", "asymmetric", "act-order with bias"],
)
def test_plain_kernels_compile_for_hopper_without_one(
    scheme: dict[str, Any], layer: dict[str, Any], tmp_path: Path
) -> None:
    """Every start of vLLM's: both GEMMs for each, and no token count of verification adds any."""
    pytest.importorskip("triton")
    found = run(PLAIN, tmp_path, json.dumps(scheme), json.dumps(layer))
    gemms = 0
    for tokens in (1, 16, 32, 64):
        gemms += 2
        for count in (tokens, 2, 17, 64, 128):
            built = found[f"{tokens} {count}"]
            assert built["moe_gemm_kernel"] == gemms, (tokens, count, built)
            assert built["activation_kernel"] == built["reduce_kernel"] == 1


HUMMING = """
import json, sys, types
from dataclasses import replace
import torch
from autosel.core import Problem, QuantScheme
from tests.backends import test_humming as stand_ins
from tests.backends.adapters import H200

def module(name, **members):
    made = sys.modules[name] = types.ModuleType(name)
    made.__dict__.update(members)

def no_device():
    raise RuntimeError("the device was opened")

class HummingKernel:
    asked = []
    def register_kernel(self):
        raise RuntimeError("a kernel was loaded")
    @classmethod
    def prepare_kernels(cls, layer, compute, tuning, device):
        assert device == 0
        device = sys.modules["humming.device"]
        record = device._get_device_info_extension()._DeviceInfo(0)
        assert (record.sm_version, record.sm_count) == (90, 132), record
        cls.asked.append([layer, json.loads(compute)["gemm_type"], json.loads(tuning)[0][2]])

class Layer(stand_ins.LayerConfig):
    def to_str(self):
        return f"{self.shape_n} x {self.shape_k}, {self.experts} experts"

def prepare_layer_config(device, **options):
    assert device == 0, device
    made = stand_ins.prepare_layer_config(**options)
    return Layer(**made.__dict__)

def never(*args, **kwargs):
    raise RuntimeError("a kernel was launched")

for name in ("humming", "humming.kernel"):
    module(name, __path__=[])
module("humming.device", _get_device_info_extension=no_device)
module("humming.kernel.humming", HummingKernel=HummingKernel)
module("humming.forward", humming_forward=never)
module("humming.schema", HummingInputSchema=stand_ins.HummingInputSchema,
       HummingWeightSchema=stand_ins.HummingWeightSchema)
module("humming.transform", prepare_layer_config=prepare_layer_config)
module("humming.tune", get_heuristics_config=stand_ins.get_heuristics_config)

scheme = QuantScheme(4, 64, True, has_g_idx=sys.argv[1] == "order", scale_dtype="bfloat16")
problem = Problem(8, 8, 2, 256, 128, scheme, scheme)
from autosel.backends.batched_humming import BatchedHumming
from autosel.backends.humming import Humming
from autosel.backends import _humming_choices
made, order = _humming_choices.choices, []

def choices(heuristics, asked, meanwhile):
    order.append([[one.layer.shape_k, one.kind] for one in (asked, *meanwhile)])
    return made(heuristics, asked, meanwhile)

_humming_choices.choices = choices
found = {}
for backend in (Humming(), BatchedHumming()):
    for kind in backend.kinds:
        for count in backend.compiled_counts(problem, {}, (1, 64), H200):
            HummingKernel.asked.clear()
            order.clear()
            params = {"kind": kind}
            backend.compile_ahead(problem, params, count, H200)
            found[f"{kind} {count}"] = list(HummingKernel.asked)
            found[f"{kind} {count} lists"] = order[0]
assert not torch.cuda.is_initialized()
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["plain", "order"])
def test_humming_is_asked_for_both_gemms_of_each_token_count(order: str, tmp_path: Path) -> None:
    """The configurations are those of a call: by rows, 2 for 1 token and 128 for 64."""
    pytest.importorskip("triton")
    found = run(HUMMING, tmp_path, order)
    layers = ["256 x 256, 8 experts", "256 x 128, 8 experts"]
    for kind in ("indexed", "grouped_contiguous", "grouped_masked"):
        for count, blocks in ((1, (16, 32)), (64, (32, 64))):
            expected = [
                [layer, kind, {"block_shape": [block, 64, 64]}]
                for layer, block in zip(layers, blocks, strict=True)
            ]
            assert found[f"{kind} {count}"] == expected
            # Who finds a list taken computes the other GEMM's, then those of the other kind.
            kinds = [kind, *{"indexed", "grouped_contiguous"}.difference({kind})]
            kinds = kinds[: 1 if kind == "grouped_masked" else 2]
            lists = [[k, one] for one in kinds for k in (256, 128)]
            assert found[f"{kind} {count} lists"] == lists
    built = {path.stem for path in (tmp_path / "cache").rglob("*.cubin")}
    assert {"activation_kernel", "reduce_kernel"} <= built
    assert ("gather_inputs" in built) == (order == "order")


def test_an_unknown_fact_of_the_device_is_said() -> None:
    from autosel.backends._humming_offline import record
    from autosel.errors import UnsupportedError

    assert record(H200).sm_version == 90
    with pytest.raises(UnsupportedError, match="multiprocessors"):
        record(replace(H200, multiprocessors=None))
    assert not torch.cuda.is_initialized()
