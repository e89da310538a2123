"""The names of vLLM's oracle."""

from __future__ import annotations

import pytest
import torch

from autosel import registry
from autosel.backends import _vllm_ops
from autosel.core import Activation, Device
from autosel.errors import AutoselError, NothingUsableError, UnsupportedError
from autosel.vllm_names import (
    WNA16MoEBackend,
    convert_to_wna16_moe_kernel_format,
    make_wna16_moe_quant_config,
    map_wna16_backend,
    select_wna16_moe_backend,
)
from tests.backends import stub_ops
from tests.layouts import make

H200 = Device("cuda", "H200", (9, 0), 132, 150 << 30, 50 << 20, 232448)
A100 = Device("cuda", "A100", (8, 0), 108, 80 << 30, 40 << 20, 166912)
CPU = Device("cpu", "EPYC")


@pytest.fixture
def _with_marlin(monkeypatch: pytest.MonkeyPatch):
    if _vllm_ops._taken("_moe_C"):
        pytest.skip("a library with namespace _moe_C is loaded: the stand-ins cannot be")
    with stub_ops.marlin():
        yield


def test_every_name_is_a_backend() -> None:
    for member in WNA16MoEBackend:
        backend = member.backend
        assert backend.name == member.value.lower()
        assert not isinstance(backend, registry.UnavailableBackend), str(backend.available(CPU))


@pytest.mark.parametrize("word", ["marlin", "MARLIN", " Marlin "])
def test_map(word: str) -> None:
    assert map_wna16_backend(word) is WNA16MoEBackend.MARLIN
    assert map_wna16_backend("flashinfer-trtllm") is WNA16MoEBackend.FLASHINFER_TRTLLM


def test_map_refuses_unknown_names() -> None:
    with pytest.raises(AutoselError, match="found 'cutlass', expected marlin, batched_marlin"):
        map_wna16_backend("cutlass")


@pytest.mark.usefixtures("_with_marlin")
def test_select_follows_the_order() -> None:
    problem = make.problem()
    assert select_wna16_moe_backend(problem, A100)[0] is WNA16MoEBackend.MARLIN
    member, backend = select_wna16_moe_backend(problem, A100, batched_activations=True)
    assert member is WNA16MoEBackend.BATCHED_MARLIN
    assert backend.name == "batched_marlin"
    # what Marlin refuses falls to the next one
    assert select_wna16_moe_backend(make.problem(160, 96), A100)[0] is WNA16MoEBackend.TRITON
    assert select_wna16_moe_backend(problem, H200)[0] is not WNA16MoEBackend.TRITON


@pytest.mark.usefixtures("_with_marlin")
def test_a_forced_backend_says_why_not() -> None:
    with pytest.raises(UnsupportedError, match=r"backend marlin: hidden_size: found 160"):
        select_wna16_moe_backend(make.problem(160, 96), A100, moe_backend="marlin")
    chosen = select_wna16_moe_backend(make.problem(), A100, moe_backend="emulation")
    assert chosen[0] is WNA16MoEBackend.EMULATION


def test_nothing_usable_gives_all_reasons() -> None:
    problem = make.problem(bits=8, symmetric=False)
    with pytest.raises(NothingUsableError, match=r"zen_cpu: .* \| cpu: "):
        select_wna16_moe_backend(problem, Device("cpu", "old"))


def test_convert_and_quant_config() -> None:
    problem = make.problem(256, 128, symmetric=False, bias=True,
                           activation=Activation("silu", limit=7.0))  # fmt: skip
    experts = make.experts(problem)
    before = make.copy(experts)
    converted = convert_to_wna16_moe_kernel_format(WNA16MoEBackend.MARLIN, experts)
    make.assert_same(experts, before)
    packed = registry.get("marlin").layout(problem, {}).pack(experts)
    assert len(converted) == 10
    for field, name in (
        ("w13_qweight", "w13"), ("w2_qweight", "w2"), ("w13_scales", "w13_scales"),
        ("w2_scales", "w2_scales"), ("w13_qzeros", "w13_zeros"), ("w2_qzeros", "w2_zeros"),
        ("w13_bias", "w13_bias"), ("w2_bias", "w2_bias"),
    ):  # fmt: skip
        assert torch.equal(getattr(converted, field), packed.tensors[name]), field
    config = make_wna16_moe_quant_config(problem, converted)
    assert (config.num_bits, config.group_size, config.gemm1_clamp_limit) == (4, 32, 7.0)
    assert config.w1_zp is converted.w13_qzeros
    assert config.w2_bias is converted.w2_bias


def test_convert_for_flashinfer() -> None:
    converted = convert_to_wna16_moe_kernel_format(
        WNA16MoEBackend.FLASHINFER_TRTLLM, make.experts(make.problem(256, 256))
    )
    assert converted.w13_qweight.dtype == torch.uint8
    assert converted.w13_qzeros is None
    assert converted.w13_scales is not None


def test_a_quant_config_describes_one_scheme() -> None:
    problem = make.problem(256, 128, group=64, group2=32)
    converted = convert_to_wna16_moe_kernel_format(WNA16MoEBackend.TRITON, make.experts(problem))
    with pytest.raises(UnsupportedError, match="group_size: found 64 and 32"):
        make_wna16_moe_quant_config(problem, converted)
