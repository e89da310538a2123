"""Steady state: after the first call of a size nothing is allocated but the result."""

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from autosel import FusedMoE, registry, workspace
from autosel.core import Problem, QuantScheme, Routing
from autosel.reference import moe
from autosel.sharding import shard_ep
from autosel.sources import RandomSource
from tests.fakes import Clock, FakeBackend, registered

SCHEME = QuantScheme(4, 32, True)
SOURCE = RandomSource(Problem(8, 8, 2, 64, 32, SCHEME, SCHEME))


def allocations(call) -> list[int]:
    """Bytes of every block that torch's CPU allocator hands out, temporaries included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    events = seen.profiler.kineto_results.events()
    return [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]


def inputs(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, 8, generator=generator).topk(2).indices.to(torch.int32)
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    return x, ids, torch.rand(tokens, 2, generator=generator)


@pytest.fixture(scope="module")
def layer():
    if not registry.get("cpu_native").supports(SOURCE.problem, detect_cpu()):
        pytest.skip("cpu_native does not run here")
    return FusedMoE.from_source(SOURCE, db=":memory:")


def detect_cpu():
    from autosel.device import detect

    return detect("cpu")


def test_the_counter_sees_an_allocation_inside_an_operator():
    a = torch.randn(8, 8)
    assert allocations(lambda: (a @ a + 1).sum())
    assert allocations(lambda: a.add_(a)) == []


#: What callers pass; each is brought into the form that kernels read, in planned memory.
FORMS = {
    "plain": lambda x, ids, weights: (x, ids, weights),
    "int64 ids": lambda x, ids, weights: (x, ids.long(), weights),
    "uint8 ids": lambda x, ids, weights: (x, ids.to(torch.uint8), weights),
    "bfloat16 weights": lambda x, ids, weights: (x, ids, weights.bfloat16()),
    "columns of wider tensors": lambda x, ids, weights: (
        torch.cat([x, x], 1)[:, :64],
        torch.cat([ids, ids], 1)[:, :2],
        torch.cat([weights, weights], 1)[:, :2],
    ),
    "transposed": lambda x, ids, weights: (
        x.t().contiguous().t(),
        ids.t().contiguous().t(),
        weights.t().contiguous().t(),
    ),
    "strays": lambda x, ids, weights: (x, ids.where(ids != 3, 99), weights),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inference", [False, True])
def test_an_ordinary_call_allocates_the_result_alone(layer, form, inference):
    call = FORMS[form](*inputs(5))
    out = torch.empty(5, 64, dtype=torch.bfloat16)
    with torch.inference_mode(inference):
        for _ in range(2):
            layer(*call)
        assert allocations(lambda: layer(*call)) == [out.numel() * 2]
        layer(*call, out=out)
        assert allocations(lambda: layer(*call, out=out)) == []
        assert torch.equal(out, layer(*call))


def test_a_rank_of_expert_parallelism_allocates_the_result_alone(layer):
    whole = SOURCE.load()
    parts = [
        FusedMoE.from_experts(shard_ep(whole, rank, 2), ep_rank=rank, ep_size=2, db=":memory:")
        for rank in range(2)
    ]
    x, ids, weights = inputs(6)
    out = torch.empty_like(x)
    for part in parts:
        for form in (ids, ids.long()):
            part(x, form, weights, out=out)
            assert allocations(lambda: part(x, form, weights, out=out)) == []  # noqa: B023
    assert (sum(p(x, ids, weights).float() for p in parts) - layer(x, ids, weights)).norm() < 0.05


def test_sizes_that_alternate_stay_planned(layer):
    calls = [inputs(tokens, tokens) for tokens in (1, 33, 7, 2)]
    outs = [torch.empty_like(x) for x, _, _ in calls]

    def all_of_them():
        for call, out in zip(calls, outs, strict=True):
            layer(call[0], call[1].long(), call[2], out=out)

    kept = [(x, ids.long(), weights) for x, ids, weights in calls]

    def the_same_without_conversions():
        for call, out in zip(kept, outs, strict=True):
            layer(*call, out=out)

    all_of_them()
    all_of_them()
    assert allocations(the_same_without_conversions) == []


def test_results_of_different_calls_share_no_memory(layer):
    first = layer(*inputs(4, 1))
    kept = first.clone()
    second = layer(*inputs(4, 2))
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


def test_what_is_planned_in_inference_mode_serves_outside_of_it(layer):
    x, ids, weights = inputs(11)
    with torch.inference_mode():
        expected = layer(x, ids.long(), weights.bfloat16())
    for _ in range(2):
        assert torch.equal(layer(x, ids.long(), weights.bfloat16()), expected)


# the planned memory itself -----------------------------------------------------------------------


@pytest.fixture
def fresh():
    workspace.release()
    yield
    workspace.release()


CPU = torch.device("cpu")


def bracket(*shapes):
    held = workspace.begin(CPU)
    try:
        return [workspace.empty(shape, torch.float32, CPU) for shape in shapes]
    finally:
        workspace.end(held)


def test_parts_of_a_call_are_apart_aligned_and_the_same_again(fresh):
    shapes = ((3, 5), (0, 4), (1,), (64, 64))
    bracket(*shapes)
    assert workspace.nbytes() >= 4 * (15 + 1 + 4096)
    parts = bracket(*shapes)
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [part.shape for part in parts] == [torch.Size(shape) for shape in shapes]
    assert all(bool((part == number).all()) for number, part in enumerate(parts))
    assert all(part.data_ptr() % 64 == 0 for part in parts if part.numel())
    assert all(a is b for a, b in zip(bracket(*shapes), parts, strict=True))
    workspace.release()
    assert workspace.nbytes() == 0


def test_outside_of_a_call_and_inside_a_second_one_memory_is_its_own(fresh):
    bracket((8,))
    held = workspace.begin(CPU)
    first = workspace.empty((8,), torch.float32, CPU)
    assert workspace.begin(CPU) is None
    workspace.end(None)
    second = workspace.empty((8,), torch.float32, CPU)
    workspace.end(held)
    outside = workspace.empty((8,), torch.float32, CPU)
    assert len({t.data_ptr() for t in (first, second, outside)}) == 3


def test_a_call_that_raises_ends_its_bracket(layer):
    with pytest.raises(Exception, match="topk_ids"):
        layer(inputs(3)[0], torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5))
    assert workspace._thread.active is None


def test_without_memory_to_plan_calls_go_on(fresh, layer, monkeypatch):
    def none_left(self):
        self.drop()

    monkeypatch.setattr(workspace.Workspace, "grow", none_left)
    x, ids, weights = inputs(5)
    assert torch.equal(layer(x, ids.long(), weights), layer(x, ids, weights))
    assert workspace.nbytes() == 0


def test_many_sizes_do_not_pile_up(fresh, monkeypatch):
    monkeypatch.setattr(workspace, "_MOST_VIEWS", 10)
    bracket((4096,))
    for size in range(1, 100):
        bracket((size,))
    (held,) = workspace._thread.held.values()
    assert len(held.views) <= 10


# threads -----------------------------------------------------------------------------------------


def test_threads_with_different_counts_do_not_share_scratch(layer):
    """Forms that go through planned memory, in many threads at once, sizes changing in each."""
    calls = [inputs(tokens, tokens) for tokens in (1, 2, 3, 8, 17, 33)]
    calls = [(x, ids.long(), weights.bfloat16()) for x, ids, weights in calls]
    expected = [layer(*call) for call in calls]
    wrong: list[int] = []
    start = threading.Barrier(6)

    def work(number):
        torch.set_num_threads(1)
        start.wait()
        for step in range(200):
            which = (number + step) % len(calls)
            if not torch.equal(layer(*calls[which]), expected[which]):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Shared:
    """What :class:`autosel.workspace._Thread` is for one thread, for all of them."""

    def __init__(self):
        self.active, self.held = None, {}


@pytest.mark.parametrize("planted", [False, True])
def test_each_thread_has_scratch_of_its_own(monkeypatch, planted):
    """And the planted fault, one buffer for all threads, shows as one address."""
    monkeypatch.setattr(workspace, "_thread", (Shared if planted else workspace._Thread)())
    parts: list[torch.Tensor] = []  # kept: freed memory of one thread may be given to the next

    def work():
        for _ in range(2):  # the first call finds no buffer yet
            held = workspace.begin(CPU)
            part = workspace.empty((4,), torch.float32, CPU)
            workspace.end(held)
        parts.append(part)

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (len({part.data_ptr() for part in parts}) == 1) is planted


# ids that are no expert --------------------------------------------------------------------------


@pytest.mark.parametrize("stray", [-1, -5, 8, 9, 2**31 - 1, -(2**31)])
def test_native_kernels_leave_out_any_other_id_and_its_weight(layer, stray):
    """What ``reads_any_ids`` promises, asked of the kernel itself."""
    x, ids, weights = inputs(6)
    entry = layer._runtime.entries[0]
    assert entry.backend.reads_any_ids
    strays, nan = ids.clone(), weights.clone()
    strays[0, 1], strays[3] = stray, stray
    nan[0, 1], nan[3] = float("nan"), float("nan")
    out = entry.backend.run(
        entry.packed, x, Routing(strays, nan), entry.params, torch.full_like(x, float("nan"))
    )
    plain = torch.where(strays == stray, -1, ids)
    ref = moe(x, SOURCE.load(), Routing(plain, weights), dtype=torch.float32)
    assert torch.isfinite(out).all()
    assert not out[3].any()
    assert (out.float() - ref).norm() / ref.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_other_backends_get_ids_in_range_and_finite_weights(dtype):
    seen = []

    class Strict(FakeBackend):
        def run(self, packed, x, routing, params, out):
            seen.append((routing.topk_ids.clone(), routing.topk_weights.clone()))
            return super().run(packed, x, routing, params, out)

    with registered(strict=Strict(Clock())), pytest.MonkeyPatch.context() as patch:
        patch.setattr("autosel.layer_choice.DEFAULTS", ("strict",))
        made = FusedMoE.from_source(SOURCE, db=":memory:")
        x, ids, weights = inputs(3)
        ids, weights = ids.to(dtype), weights.clone()
        ids[0, 0], weights[0, 0] = 77, float("nan")
        made(x, ids, weights)
    found, used = seen[-1]
    assert found.dtype == torch.int32
    assert found[0, 0] == -1
    assert used[0, 0] == 0
    assert torch.equal(found[1:], ids[1:].to(torch.int32))
    assert torch.equal(used[1:], weights[1:])


def test_an_int64_id_beyond_32_bits_is_no_expert(layer):
    x, ids, weights = inputs(2)
    wide, gone = ids.long(), ids.clone()
    wide[0, 0], gone[0, 0] = 2**32 + 1, -1
    assert torch.equal(layer(x, wide, weights), layer(x, gone, weights))


def test_a_call_that_is_handed_over_keeps_its_ids():
    """Ids converted in planned memory for a kernel that fails must not reach the next one."""
    seen = []

    class Failing(FakeBackend):
        reads_any_ids = True

        def run(self, packed, x, routing, params, out):
            if failing:
                scratch = workspace.empty((4096,), torch.int32, x.device)
                scratch.fill_(7)
                raise RuntimeError("no")
            return super().run(packed, x, routing, params, out)

    class Next(FakeBackend):
        def run(self, packed, x, routing, params, out):
            workspace.empty((4096,), torch.int32, x.device).fill_(5)
            seen.append(routing.topk_ids.clone())
            return super().run(packed, x, routing, params, out)

    failing = False
    with (
        registered(first=Failing(Clock()), second=Next(Clock())),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("autosel.layer_choice.DEFAULTS", ("first", "second"))
        made = FusedMoE.from_source(SOURCE, db=":memory:")
        x, ids, weights = inputs(3)
        for _ in range(2):
            made(x, ids.long(), weights)
        failing = True
        with pytest.warns(UserWarning, match="withdrawn"):
            made(x, ids.long(), weights)
    assert torch.equal(seen[-1], ids)
