"""What a process has switched on around a layer changes neither its numbers nor who serves."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from autosel import FusedMoE, layer_surroundings, registry
from autosel.core import Problem, QuantScheme
from autosel.device import detect
from autosel.errors import AutoselError
from autosel.layer_choice import WithdrawnWarning
from autosel.routing_spec import RouterSpec
from autosel.sharding import shard_ep
from autosel.sources import RandomSource
from autosel.store import Store
from tests.fakes import PROBLEM, Clock, FakeBackend, registered
from tests.layer.decided import candidate, store_times

SCHEME = QuantScheme(4, 32, True, scale_dtype="float32")
EXACT = Problem(8, 8, 2, 64, 32, SCHEME, SCHEME, act_dtype="float32")
BACKENDS = [
    backend.name
    for backend in registry.all_backends()
    if backend.supports(EXACT, detect("cpu")) and backend.name != "cpu"
]


def inputs(tokens=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    ids = torch.rand(tokens, 8, generator=generator).topk(2).indices
    return x, ids, torch.rand(tokens, 2, generator=generator)


def made(name, tmp_path, problem=EXACT, experts=None, **options):
    device = detect("cpu")
    winner = candidate(name, problem, device, 4)
    if registry.get(name).accuracy(winner.params_dict) != "exact":
        pytest.skip(f"{name} quantises activations")
    with Store.open(tmp_path / f"{len(list(tmp_path.iterdir()))}.db") as store:
        store_times(store, problem, device, {4: {winner: 10.0}})
        if experts is not None:
            layer = FusedMoE.from_experts(experts, db=store, **options)
        else:
            layer = FusedMoE.from_source(RandomSource(problem), db=store, **options)
    assert [choice.candidate for choice in layer.choices] == [winner]
    return layer


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "deterministic": deterministic,
}


@pytest.mark.parametrize("kind", SURROUNDINGS)
@pytest.mark.parametrize("name", BACKENDS)
def test_made_or_called_in_them_the_result_is_the_same_to_the_bit(name, kind, tmp_path):
    call = inputs()
    expected = made(name, tmp_path)(*call)
    with warnings.catch_warnings():
        warnings.simplefilter("error", WithdrawnWarning)
        with SURROUNDINGS[kind]():
            inside = made(name, tmp_path)
            assert torch.equal(inside(*call), expected)
            assert torch.equal(inside(*call, out=torch.empty_like(call[0])), expected)
        assert torch.equal(inside(*call), expected)
        outside = made(name, tmp_path)
        with SURROUNDINGS[kind]():
            for _ in range(2):
                assert torch.equal(outside(*call), expected)


@pytest.mark.parametrize("kind", SURROUNDINGS)
def test_a_rank_with_a_map_too(kind, tmp_path):
    part = shard_ep(RandomSource(EXACT).load(), 1, 2)
    call = inputs()
    options = {"problem": part.problem, "experts": part, "ep_rank": 1, "ep_size": 2}
    expected = made("emulation", tmp_path, **options)(*call)
    with SURROUNDINGS[kind]():
        inside = made("emulation", tmp_path, **options)
        assert torch.equal(inside(*call), expected)
    assert torch.equal(inside(*call), expected)


@pytest.mark.parametrize("kind", SURROUNDINGS)
def test_from_a_checkpoint_too(kind, get_checkpoint):
    """Reading makes tensors as well: the group index and the zero points of every expert."""
    path = get_checkpoint("gptq-v1-w4-g64-sym-actorder-qwen3moe").path
    plain = FusedMoE.from_checkpoint(path, 0, act_dtype="float32")
    x = torch.randn(3, plain.problem.hidden_size)
    logits = torch.randn(3, plain.problem.num_experts)
    expected = plain.apply_monolithic(x, logits)
    with SURROUNDINGS[kind]():
        inside = FusedMoE.from_checkpoint(path, 0, act_dtype="float32")
    assert torch.equal(inside.apply_monolithic(x, logits), expected)
    if "device" not in kind:  # there the routing itself would be made elsewhere
        with SURROUNDINGS[kind]():
            torch.testing.assert_close(plain.apply_monolithic(x, logits), expected)


def test_autocast_would_change_the_numbers(tmp_path, monkeypatch):
    """The planted fault: without the guard float32 products are made of bfloat16 values."""
    call, layer = inputs(), made("emulation", tmp_path)
    expected = layer(*call)
    monkeypatch.setattr("autosel.layer_runtime.undisturbed", lambda index: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        off = (layer(*call) - expected).norm() / expected.norm()
    assert float(off) > 1e-4


def test_the_caller_finds_its_surroundings_as_it_left_them(tmp_path):
    seen = []

    def shared(x):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return torch.zeros_like(x)

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        layer = made("emulation", tmp_path, shared_experts=shared)
        layer(*inputs())
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float32
    assert seen == [(True, True)]
    with default_dtype(torch.bfloat16):
        made("emulation", tmp_path)
        assert torch.get_default_dtype() == torch.bfloat16


def test_a_call_is_made_on_the_layers_device(monkeypatch):
    """With two devices in a process kernels are launched on the layer's, not the current one."""
    current, entered = [0], []

    class Module:
        @staticmethod
        def device(index):
            entered.append(index)
            return nullcontext()

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: current[0])
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    there = torch.device("cuda", 1)
    assert not layer_surroundings.undisturbed(there.index)
    assert layer_surroundings.undisturbed(0)
    with layer_surroundings.for_calls(there):
        pass
    assert entered == [1]
    current[0] = 1
    assert layer_surroundings.undisturbed(there.index)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_a_layer_on_the_second_device_while_the_first_is_current():
    problem = Problem(8, 8, 2, 128, 128, QuantScheme(4, 64, True), QuantScheme(4, 64, True))
    x, ids = torch.randn(6, 128).bfloat16(), torch.rand(6, 8).topk(2).indices
    weights = torch.rand(6, 2)
    right = FusedMoE.from_source(RandomSource(problem))(x, ids, weights)
    with torch.cuda.device(0):
        layer = FusedMoE.from_source(RandomSource(problem), device="cuda:1")
        for _ in range(3):
            out = layer(x.to("cuda:1"), ids.to("cuda:1"), weights.to("cuda:1"))
        assert torch.cuda.current_device() == 0
    assert float((out.cpu().float() - right.float()).norm() / right.float().norm()) < 2e-2


def test_inside_a_capture_nothing_is_read_and_nothing_touches_the_stream(monkeypatch):
    monkeypatch.setattr("autosel.layer_build.capturing", lambda device: True)
    monkeypatch.setattr(RandomSource, "load", lambda *_: pytest.fail("loaded"))
    part = replace(EXACT, num_local_experts=4)
    for options in ({}, {"ep_rank": 1, "ep_size": 2}):
        source = RandomSource(part if options else EXACT)
        with pytest.raises(AutoselError, match="made: found inside a graph capture"):
            FusedMoE.from_source(source, **options)


# whoever follows torch's operators ---------------------------------------------------------------


@pytest.fixture
def layer():
    return FusedMoE.from_source(RandomSource(EXACT), router=RouterSpec(2), db=":memory:")


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_one_operator(layer):
    call = inputs()
    expected = layer(*call)
    with Seen() as seen:
        assert torch.equal(layer(*call), expected)
    assert seen.names.count("autosel.fused_moe.default") == 1


def test_fake_tensors_give_a_shape_and_withdraw_nobody(layer):
    before = layer.choices
    with warnings.catch_warnings():
        warnings.simplefilter("error", WithdrawnWarning)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(tensor) for tensor in inputs(7)]
            out = layer(*fake)
        outside = layer(*fake)
    assert (out.shape, out.dtype) == ((7, 64), torch.float32)
    assert outside.shape == out.shape
    assert layer.choices == before


def test_traced_graphs_hold_the_operator_and_no_constant(layer):
    first, other = inputs(5), inputs(5)
    other = (other[0] * 2, other[1], other[2])
    for traced in (
        torch.jit.trace(lambda x, i, w: layer(x, i, w), first, check_trace=False),
        make_fx(lambda x, i, w: layer(x, i, w))(*first),
    ):
        assert torch.equal(traced(*other), layer(*other))


def test_exported_with_any_number_of_tokens(layer):
    tokens = torch.export.Dim("tokens", min=2, max=64)
    shapes = {"x": {0: tokens}, "ids": {0: tokens}, "weights": {0: tokens}}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = [layer]  # hidden from export, which would copy a module's state

        def forward(self, x, ids, weights):
            return self.experts[0](x, ids, weights)

    exported = torch.export.export(Model(), inputs(5), dynamic_shapes=shapes).module()
    assert torch.equal(exported(*inputs(9)), layer(*inputs(9)))


@pytest.mark.parametrize("which", [0, 2])
def test_gradients_are_refused_wherever_they_come_from(layer, which):
    """A router that is trained must not lose its gradient silently."""
    call = list(inputs())
    call[which] = call[which].requires_grad_()
    out = layer(*call)
    assert out.requires_grad
    with pytest.raises(AutoselError, match="gradient"):
        (call[0] + out).sum().backward()
    with torch.no_grad():
        assert not layer(*call).requires_grad


def test_a_router_with_parameters_in_any_form_of_weights(layer):
    """Weights with a graph behind them reach planned memory in every form that is converted."""
    gate = nn.Linear(64, 8)
    x, _, _ = inputs()
    expected = None
    for dtype in (torch.float32, torch.float64):
        for repeat in range(2):
            values, ids = gate(x).softmax(-1).topk(2)
            out = layer(x, ids, values.to(dtype))
            expected = out.detach() if expected is None else expected
            torch.testing.assert_close(out.detach(), expected)
            assert layer.apply_monolithic(x, gate(x)).shape == x.shape, repeat
            with torch.no_grad():
                torch.testing.assert_close(layer(x, ids, values.to(dtype)), expected)
    assert not layer(x, ids.detach(), values.detach()).requires_grad


def test_vmap_is_right_or_refused_and_withdraws_nobody(layer):
    x, ids, weights = (torch.stack([t, t]) for t in inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error", WithdrawnWarning)
        try:
            out = torch.vmap(layer)(x, ids, weights)
        except (RuntimeError, NotImplementedError):
            return
    assert torch.equal(out[0], layer(*inputs()))


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
def test_compiled_with_memory_for_the_result(shape, monkeypatch):
    monkeypatch.setattr("autosel.layer_choice.DEFAULTS", ("emulation",))
    layer = FusedMoE.from_source(RandomSource(EXACT), db=":memory:")
    call = [tensor.view(*shape[:-1], -1) for tensor in inputs(6)]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        for out in (torch.empty(shape), torch.empty(*shape[:-1], 128)[..., :64]):
            out.fill_(torch.nan)
            compiled(*call, out=out)
            assert torch.equal(out, layer(*call))


def test_a_plain_fault_still_counts():
    """The guard is about who looks on, not about failures: those withdraw as before."""

    def broken(params):
        if failing:
            raise RuntimeError("no")

    failing = False
    with registered(first=FakeBackend(Clock(), before=broken)), pytest.MonkeyPatch.context() as p:
        p.setattr("autosel.layer_choice.DEFAULTS", ("first", "emulation"))
        layer = FusedMoE.from_source(RandomSource(PROBLEM), db=":memory:")
        failing = True
        x = torch.randn(3, PROBLEM.hidden_size).bfloat16()
        with torch.autocast("cpu"), pytest.warns(WithdrawnWarning):
            layer(x, torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2))
    assert layer.choices[0].candidate.backend == "emulation"
