"""FusedMoE as a torch module: inputs, outputs, state, threads, torch.compile."""

import copy
import gc
import io
import pickle
import threading
import timeit
from dataclasses import replace

import pytest
import torch
from torch import nn

from autosel import FusedMoE, layer_op, load_moe_layers, registry
from autosel.checkpoint import Checkpoint
from autosel.core import CanonicalExperts, Problem, QuantScheme, QuantWeight, Routing
from autosel.errors import AutoselError, CheckpointError, RoutingError, UnsupportedError
from autosel.packing import pack_last
from autosel.reference import moe
from autosel.routing_spec import RouterSpec
from autosel.sources import CheckpointSource, RandomSource
from tests.fakes import PROBLEM, Clock, FakeBackend, PlainLayout, registered

H, TOP_K = PROBLEM.hidden_size, PROBLEM.top_k


@pytest.fixture(scope="module")
def source():
    return RandomSource(PROBLEM)


@pytest.fixture(scope="module")
def layer(source):
    return FusedMoE.from_source(source, db=":memory:")


def inputs(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, PROBLEM.num_experts, generator=generator).topk(TOP_K).indices
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return x, ids.to(torch.int32), weights


def right(source, x, ids, weights):
    return moe(x, source.load(), Routing(ids, weights))


def close(out, ref):
    return float((out.double() - ref).norm() / ref.norm()) < 0.01


# inputs and outputs ------------------------------------------------------------------------------


def test_any_leading_shape(layer, source):
    x, ids, weights = inputs(12)
    flat = layer(x, ids, weights)
    assert close(flat, right(source, x, ids, weights))
    for shape in ((3, 4), (2, 3, 2), (12, 1)):
        out = layer(x.view(*shape, H), ids.view(*shape, -1), weights.view(*shape, -1))
        assert out.shape == (*shape, H)
        assert torch.equal(out.view(-1, H), flat)
    assert torch.equal(layer(x[0], ids[0], weights[0]), flat[0])


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_no_tokens(layer, shape):
    out = layer(
        torch.empty(*shape, H, dtype=torch.bfloat16),
        torch.empty(*shape, TOP_K, dtype=torch.int32),
        torch.empty(*shape, TOP_K),
    )
    assert out.shape == (*shape, H)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("trusted", [False, True])
def test_without_tokens_nothing_is_run(source, monkeypatch, trusted):
    monkeypatch.setattr("autosel.layer_choice.DEFAULTS", ("first",))
    with registered(first=FakeBackend(Clock())):
        layer = FusedMoE.from_source(source)
        before = registry.get("first").calls
        layer(*inputs(0), trusted=trusted)
        assert registry.get("first").calls == before


def test_views_with_gaps_are_read_as_what_they_are(layer):
    x, ids, weights = inputs(6)
    packed = layer(x, ids, weights)
    wide = torch.randn(6, 2 * H).to(torch.bfloat16)
    wide[:, :H] = x
    every_second = torch.randn(6, 2 * H).to(torch.bfloat16)
    every_second[:, ::2] = x
    transposed = x.t().contiguous().t()
    slices = torch.rand(6, 3 * TOP_K)
    slices[:, TOP_K : 2 * TOP_K] = weights
    column = slices[:, TOP_K : 2 * TOP_K]
    wide_ids = torch.full((6, 2 * TOP_K), 3, dtype=torch.int32)
    wide_ids[:, ::2] = ids
    for trusted in (False, True):
        for view in (wide[:, :H], every_second[:, ::2], transposed):
            assert torch.equal(layer(view, ids, weights, trusted=trusted), packed)
        assert torch.equal(layer(x, ids, column, trusted=trusted), packed)
        assert torch.equal(layer(x, wide_ids[:, ::2], weights, trusted=trusted), packed)


@pytest.mark.parametrize("stray", [-5, 4, 2**31 - 1])
def test_ids_that_are_no_expert_add_nothing(layer, source, stray):
    x, ids, weights = inputs(5)
    ids[2, 0] = stray
    weights[2, 0] = torch.nan
    out = layer(x, ids, weights)
    weights[2, 0] = 0
    ids[2, 0] = -1
    assert close(out, right(source, x, ids, weights))


def test_out_is_written_and_returned(layer):
    x, ids, weights = inputs(6)
    expected = layer(x, ids, weights)
    for shape in ((6, H), (2, 3, H)):
        for out in (
            torch.full(shape, torch.nan, dtype=torch.bfloat16),
            torch.full((*shape[:-1], 2 * H), torch.nan, dtype=torch.bfloat16)[..., :H],
        ):
            got = layer(
                x.view(shape), ids.view(*shape[:-1], -1), weights.view(*shape[:-1], -1), out=out
            )
            assert got is out
            assert torch.equal(out.reshape(6, H), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, i, w: (x.float(), i, w), "x: dtype"),
        (lambda x, i, w: (x[:, :-1], i, w), "x: shape"),
        (lambda x, i, w: (x, i[:, :1], w), "topk_ids: shape"),
        (lambda x, i, w: (x, i[:1], w[:1]), "topk_ids: tokens"),
        (lambda x, i, w: (x, i.float(), w), "topk_ids: dtype"),
        (lambda x, i, w: (x, i, w.int()), "topk_weights: dtype"),
        (lambda x, i, w: (x, i, w[:, :1]), "topk_weights: shape"),
        (lambda x, i, w: (torch.tensor(1.0), i, w), "x: shape"),
    ],
)
@pytest.mark.parametrize("trusted", [False, True])
def test_wrong_inputs_are_named(layer, change, message, trusted):
    with pytest.raises(AutoselError, match=message):
        layer(*change(*inputs(3)), trusted=trusted)


@pytest.mark.parametrize("which", [1, 2])
def test_rows_in_another_arrangement_are_refused(layer, which):
    """As many tokens, and still others: [3, 2] is no [2, 3]."""
    call = [tensor.view(2, 3, -1) for tensor in inputs(6)]
    call[which] = call[which].reshape(3, 2, -1)
    name = ("x", "topk_ids", "topk_weights")[which]
    with pytest.raises(RoutingError, match=rf"{name}: shape: .*expected \[2, 3\] tokens"):
        layer(*call)
    flat = inputs(6)
    assert torch.equal(layer(flat[0].view(2, 3, H), *flat[1:]), layer(*flat).view(2, 3, H))


def test_wrong_out_is_named(layer):
    with pytest.raises(AutoselError, match="out: shape"):
        layer(*inputs(3), out=torch.empty(4, H, dtype=torch.bfloat16))


def test_trusted_gives_the_same_bits(layer):
    x, ids, weights = inputs(7)
    assert torch.equal(layer(x, ids, weights, trusted=True), layer(x, ids, weights))


def test_inputs_stay_as_they_were(layer):
    x, ids, weights = inputs(4)
    before = x.clone(), ids.clone(), weights.clone()
    layer(x, ids, weights, trusted=True)
    assert all(torch.equal(a, b) for a, b in zip((x, ids, weights), before, strict=True))


# experts elsewhere, shared experts, routing ------------------------------------------------------


def constant_experts(outputs):
    """Experts that answer ``outputs[e]`` to an input of ones, whatever its size: relu2, no gate."""
    scheme = QuantScheme(4, 16, True, scale_dtype="float32")
    problem = Problem(4, len(outputs), 2, 16, 16, scheme, scheme)
    problem = Problem.from_dict(
        {
            **problem.to_dict(),
            "activation": {**problem.to_dict()["activation"], "name": "relu2_no_mul"},
            "act_dtype": "float32",
        }
    )
    count = len(outputs)
    one = pack_last(torch.full((count, 16, 16), 9, dtype=torch.uint8), 4)
    w13 = QuantWeight(scheme, 16, one, torch.full((count, 16, 1), 1 / 16))
    scales = torch.tensor(outputs).view(-1, 1, 1).expand(count, 16, 1) / 16
    w2 = QuantWeight(scheme, 16, one, scales.contiguous())
    return CanonicalExperts(problem, w13, w2)


def test_an_id_of_minus_one_is_not_the_last_expert():
    """Experts 2 and 3 are here and answer 10 and 100."""
    layer = FusedMoE.from_experts(
        constant_experts([10.0, 100.0]), expert_map=torch.tensor([-1, -1, 0, 1])
    )
    ids = torch.tensor([[0, 2], [3, -1]])
    weights = torch.tensor([[0.3, 0.7], [0.6, 0.4]])
    out = layer(torch.ones(2, 16), ids, weights)
    torch.testing.assert_close(out[:, 0], torch.tensor([7.0, 60.0]))
    narrow = ids.to(torch.int32)
    assert torch.equal(layer(torch.ones(2, 16), narrow, weights, trusted=True), out)


@pytest.mark.parametrize(
    ("expert_map", "message"),
    [
        ([-1, -1, 0, 0], "each of 0 to 1 once"),
        ([-1, -1, 0, 2], "expert_map"),
        ([-1, 0, 1], "shape"),
        (None, "experts held"),
    ],
)
def test_maps_that_do_not_fit_are_refused(expert_map, message):
    given = None if expert_map is None else torch.tensor(expert_map)
    with pytest.raises(RoutingError, match=message):
        FusedMoE.from_experts(constant_experts([10.0, 100.0]), expert_map=given)


def test_shared_experts_are_added(source):
    seen = []

    def shared(x):
        seen.append(x)
        return x + 1

    layer = FusedMoE.from_source(source, shared_experts=shared)
    plain = FusedMoE.from_source(source)
    x, ids, weights = (t.view(2, 3, -1) for t in inputs(6))
    torch.testing.assert_close(layer(x, ids, weights), plain(x, ids, weights) + (x + 1))
    assert seen[-1].shape == x.shape
    other = torch.zeros_like(x)
    out = layer(x, ids, weights, shared_experts_input=other)
    torch.testing.assert_close(out, plain(x, ids, weights) + 1)


def views_of_x(kind, x):
    """``x`` with a result tensor that shares its memory, wholly or in part."""
    room = torch.zeros(2 * x.numel(), dtype=x.dtype)
    here = room[: x.numel()].view(x.shape).copy_(x)
    if kind == "x itself":
        return here, here
    if kind == "one row on":
        return here, room[x.shape[-1] : x.shape[-1] + x.numel()].view(x.shape)
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)
    here = wide[..., : x.shape[-1]].copy_(x)
    return here, wide[..., 1 : x.shape[-1] + 1]


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("kind", ["x itself", "one row on", "columns beside"])
def test_a_result_in_the_memory_of_x(source, kind, shape):
    """The shared experts see x as it was, not what the routed experts left there."""
    x, ids, weights = (tensor.view(*shape, -1) for tensor in inputs(6))
    for options in ({}, {"shared_experts": lambda x: 2 * x + 1}):
        layer = FusedMoE.from_source(source, **options)
        expected = layer(x, ids, weights)
        here, out = views_of_x(kind, x)
        assert layer(here, ids, weights, out=out) is out
        assert torch.equal(out, expected)
        if options:
            here, out = views_of_x(kind, x)
            layer(torch.clone(here), ids, weights, out=out, shared_experts_input=here)
            assert torch.equal(out, expected)


def test_a_shared_module_is_a_child(source):
    layer = FusedMoE.from_source(source, shared_experts=nn.Linear(H, H, dtype=torch.bfloat16))
    assert [name for name, _ in layer.named_parameters()] == [
        "shared_experts.weight",
        "shared_experts.bias",
    ]
    x, ids, weights = inputs(3)
    with torch.no_grad():
        layer(x, ids, weights)


def test_monolithic_needs_a_rule(layer):
    with pytest.raises(RoutingError, match="router"):
        layer.apply_monolithic(inputs(2)[0], torch.randn(2, 4))


def test_monolithic_is_routing_and_then_the_layer(source):
    layer = FusedMoE.from_source(source, router=RouterSpec(2))
    x = inputs(6)[0].view(2, 3, H)
    logits = torch.randn(2, 3, 4)
    weights, ids = logits.softmax(-1).topk(2)
    expected = layer(x, ids, weights / weights.sum(-1, keepdim=True))
    assert torch.equal(layer.apply_monolithic(x, logits), expected)
    assert torch.equal(layer.apply_monolithic(x, logits.view(6, 4)), expected)
    assert layer.apply_monolithic(x[:, :0], logits[:, :0]).shape == (2, 0, H)
    with pytest.raises(RoutingError, match="router_logits"):
        layer.apply_monolithic(x, logits[:1])
    # Logits of another router choose experts that are not there, which would add nothing.
    for wide in (torch.randn(2, 3, 8), torch.randn(2, 3, 3), torch.tensor(1.0)):
        with pytest.raises(RoutingError, match=r"router_logits: shape: .*4 experts"):
            layer.apply_monolithic(x, wide)


def test_apply_is_the_layer_for_tensors_and_torchs_own_for_a_function(layer):
    x, ids, weights = inputs(3)
    assert torch.equal(layer.apply(x, ids, weights), layer(x, ids, weights))
    seen = []
    assert layer.apply(seen.append) is layer
    assert seen == [layer]


# state -------------------------------------------------------------------------------------------


def test_moving_elsewhere_is_refused_and_staying_is_not(layer):
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), layer)
    assert model.to("cpu") is model
    assert model.to(torch.bfloat16) is model
    for move, word in (
        (lambda: layer.to("meta"), "device"),
        (lambda: layer.half(), "dtype"),
        (lambda: layer.float(), "dtype"),
        (lambda: layer.to(torch.float64), "dtype"),
    ):
        with pytest.raises(AutoselError, match=f"moving packed weights: .*{word}"):
            move()
    layer(*inputs(2))


def test_a_shared_module_moves_with_the_model_where_the_layer_stays(source):
    layer = FusedMoE.from_source(source, shared_experts=nn.Linear(H, H))
    layer.to(torch.bfloat16)
    assert layer.shared_experts.weight.dtype == torch.bfloat16


def test_it_is_for_inference(layer):
    assert not layer.training
    assert layer.eval() is layer
    with pytest.raises(AutoselError, match="train"):
        layer.train()
    x, ids, weights = inputs(2)
    x.requires_grad_()
    out = layer(x, ids, weights)
    with pytest.raises(AutoselError, match="gradient"):
        out.sum().backward()
    with torch.no_grad():
        assert not layer(x, ids, weights).requires_grad


def test_state_is_about_the_same_weights_or_refused(layer, source):
    state = layer.state_dict()
    assert list(state) == ["_extra_state"]
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    FusedMoE.from_source(source).load_state_dict(loaded)
    other = FusedMoE.from_source(RandomSource(PROBLEM, seed=1))
    with pytest.raises(AutoselError, match="weights"):
        other.load_state_dict(loaded)
    with pytest.raises(AutoselError, match="FusedMoE state"):
        layer.load_state_dict({"_extra_state": torch.zeros(3, dtype=torch.uint8)})


def test_copies_are_refused(layer):
    with pytest.raises(AutoselError, match="copy"):
        copy.deepcopy(layer)
    with pytest.raises(AutoselError, match="copy"):
        pickle.dumps(layer)


def test_repr_says_what_serves(layer):
    assert PROBLEM.key in repr(layer)
    assert layer.choices[0].candidate.key in repr(layer)


def test_a_layer_that_is_dropped_frees_its_weights(source):
    layer = FusedMoE.from_source(source)
    name = layer._op_name
    x, ids, weights = inputs(2)
    torch.ops.autosel.fused_moe(x, ids, weights, name)
    del layer
    gc.collect()
    with pytest.raises(AutoselError, match="still exists"):
        torch.ops.autosel.fused_moe(x, ids, weights, name)


# threads -----------------------------------------------------------------------------------------


def test_threads_share_a_layer(layer):
    calls = [inputs(tokens, seed) for seed, tokens in enumerate((1, 2, 9, 33))]
    expected = [layer(*call) for call in calls]
    wrong: list[int] = []

    def work(number):
        torch.set_num_threads(1)
        for _ in range(50):
            if not torch.equal(layer(*calls[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# torch.compile -----------------------------------------------------------------------------------


@pytest.fixture
def emulated(source, monkeypatch):
    monkeypatch.setattr("autosel.layer_choice.DEFAULTS", ("emulation",))
    return FusedMoE.from_source(source, router=RouterSpec(2))


def test_the_operator_is_well_formed(emulated):
    torch.library.opcheck(
        torch.ops.autosel.fused_moe.default,
        (*inputs(3), emulated._op_name),
        test_utils=("test_schema", "test_faketensor"),
    )


class Block(nn.Module):
    """What a model does around the layer."""

    def __init__(self, experts):
        super().__init__()
        self.gate = nn.Linear(H, PROBLEM.num_experts, bias=False, dtype=torch.bfloat16)
        self.experts = experts

    def forward(self, x):
        return x + self.experts.apply_monolithic(x, self.gate(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_graph_break(emulated, backend):
    torch._dynamo.reset()
    block = Block(emulated)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    with torch.no_grad():
        for shape in ((3, H), (2, 3, H), (7, H), (11, H)):
            x = torch.randn(shape).to(torch.bfloat16)
            assert torch.equal(compiled(x), block(x))
    topk = torch.compile(emulated, fullgraph=True, backend=backend)
    x, ids, weights = inputs(5)
    assert torch.equal(topk(x, ids, weights), emulated(x, ids, weights))


def test_traced_with_fake_tensors_the_graph_holds_one_operator(emulated):
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(emulated, fullgraph=True, backend=keep)
    with torch.no_grad():
        compiled(*inputs(5))
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls == [torch.ops.autosel.fused_moe]


# whole models ------------------------------------------------------------------------------------


def test_one_source_layer_at_a_time(get_checkpoint, monkeypatch):
    """The unpacked weights of a layer are gone before those of the next are read."""
    import weakref

    alive = []
    load = CheckpointSource.load

    def counted(self, device="cpu"):
        gc.collect()
        assert [ref for ref in alive if ref() is not None] == []
        experts = load(self, device)
        alive.extend(weakref.ref(w.codes) for w in (experts.w13, experts.w2))
        return experts

    monkeypatch.setattr(CheckpointSource, "load", counted)
    path = get_checkpoint("awq-gptqmodel-w4-g32-mixtral").path
    done = []
    layers = load_moe_layers(path, progress=lambda *numbers: done.append(numbers))
    assert sorted(layers) == [0, 1]
    assert done == [(1, 2), (2, 2)]
    gc.collect()
    assert len(alive) >= 2
    assert [ref for ref in alive if ref() is not None] == []


def test_layers_that_cannot_be_loaded_are_named(get_checkpoint, tmp_path):
    path = get_checkpoint("awq-w4-g32-deepseekv3").path
    with pytest.raises(CheckpointError, match="MoE layer: found 7"):
        load_moe_layers(path, layers=[7])
    with pytest.raises(CheckpointError, match="MoE layer: found 0"):
        FusedMoE.from_checkpoint(path, 0)
    with pytest.raises(UnsupportedError, match="multiple of 5"):
        FusedMoE.from_checkpoint(path, 1, tp_size=5)
    for device in ("nowhere", "meta"):
        with pytest.raises(AutoselError, match="device"):
            FusedMoE.from_checkpoint(path, 1, device=device)
    with pytest.raises(AutoselError, match="layouts: found 'some', expected 'one' or 'all'"):
        FusedMoE.from_checkpoint(path, 1, layouts="some")
    with pytest.raises(AutoselError, match="act_dtype"):
        FusedMoE.from_checkpoint(path, 1, act_dtype="int8")
    with pytest.raises(AutoselError, match="nowhere"):
        FusedMoE.from_checkpoint("nowhere", 1)


def test_a_layer_that_is_refused_stops_the_loading_of_a_model(get_checkpoint, monkeypatch):
    path = get_checkpoint("awq-gptqmodel-w4-g32-mixtral").path
    first, second = Checkpoint.open(path).layers
    refused = replace(second, status="refused", reason="3 bits: found 3, expected 4 or 8")
    monkeypatch.setattr(Checkpoint, "layers", property(lambda self: (first, refused)))
    with pytest.raises(CheckpointError, match="layer 1 refused: 3 bits"):
        load_moe_layers(path)
    plain = replace(second, status="unquantized", reason="kept in 16 bits")
    monkeypatch.setattr(Checkpoint, "layers", property(lambda self: (first, plain)))
    assert list(load_moe_layers(path)) == [0]
    monkeypatch.setattr(Checkpoint, "layers", property(lambda self: (plain,)))
    with pytest.raises(CheckpointError, match="quantised MoE layers: found none"):
        load_moe_layers(path)


def test_from_experts_cannot_pack_again(source, monkeypatch):
    """Its weights are gone after the packing; a candidate that fails later is the end, said so."""

    def broken(params):
        if failing:
            raise RuntimeError("no")

    failing = False
    monkeypatch.setattr("autosel.layer_choice.DEFAULTS", ("first", "second"))
    with registered(
        first=FakeBackend(Clock(), layout=PlainLayout("a"), before=broken),
        second=FakeBackend(Clock(), layout=PlainLayout("b")),
    ):
        layer = FusedMoE.from_experts(source.load())
        failing = True
        with pytest.warns(UserWarning, match="withdrawn"), pytest.raises(AutoselError) as said:
            layer(*inputs(3))
    assert "RuntimeError: no; nothing took its place: " in str(said.value)
    assert "weights to pack again: found none" in str(said.value)


def test_warm_up_runs_the_sizes_that_are_asked_for(layer, monkeypatch):
    seen = []
    entry = layer._runtime.entries[0]
    run = entry.backend._run

    def noted(packed, x, *rest):
        seen.append(len(x))
        return run(packed, x, *rest)

    monkeypatch.setattr(entry.backend, "_run", noted)
    layer.warm_up(1, 7)
    assert seen == [1, 7]
    layer.warm_up()
    assert seen[2:] == [entry.choice.bucket.measured]


# cost --------------------------------------------------------------------------------------------


def test_dispatch_costs_microseconds(layer, monkeypatch):
    """Beside the kernel: the best of many, so that a busy machine does not fail it."""
    entry = layer._runtime.entries[0]
    monkeypatch.setattr(entry.backend, "_run", lambda packed, x, routing, params, out: out)
    x, ids, weights = inputs(4)
    with torch.inference_mode():
        best = min(
            timeit.repeat(lambda: layer(x, ids, weights, trusted=True), number=100, repeat=20)
        )
    assert best / 100 * 1e6 < 50  # 7 us on an idle core


def test_names_of_layers_are_never_reused(source):
    names = {layer_op.enroll(FusedMoE.from_source(source)._runtime) for _ in range(3)}
    assert len(names) == 3
