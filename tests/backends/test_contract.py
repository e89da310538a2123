"""Every backend of the registry against the same contract, on the CPU.

A backend answers each problem either with reasons or with right numbers: there is no third way.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from autosel import canonical, registry
from autosel.core import Activation, CanonicalExperts, Problem, QuantScheme, Routing
from autosel.device import detect
from autosel.dispatch import apply
from autosel.dtypes import torch_dtype
from autosel.error_scale import judge
from autosel.errors import UnsupportedError
from autosel.routing import make_routing
from autosel.sources import RandomSource
from autosel.verify import compare, verify_candidate
from autosel.verify_cases import make_cases
from tests.threads import one_thread

NAMES = registry.names()


def scheme(bits=4, group=32, sym=True, act=False, scales="bfloat16"):
    return QuantScheme(bits, group, sym, act, scales)


def layer(w13=None, w2=None, *, experts=4, local=None, top_k=2, hidden=128, inter=64, **rest):
    w13 = w13 or scheme()
    return Problem(experts, local or experts, top_k, hidden, inter, w13, w2 or w13, **rest)


def activated(name, **constants):
    return layer(activation=Activation(name, **constants))


PROBLEMS: dict[str, Problem] = {
    "w4-g32": layer(),
    "w4-g64": layer(scheme(group=64)),
    "w4-g128": layer(scheme(group=128), hidden=256, inter=128),
    "w4-g256": layer(scheme(group=256), hidden=256, inter=256),
    "w4-g16": layer(scheme(group=16)),
    "w4-channel": layer(scheme(group=-1)),
    "w4-channel-square": layer(scheme(group=-1), hidden=128, inter=128),
    "w4-asym": layer(scheme(sym=False)),
    "w4-channel-asym": layer(scheme(group=-1, sym=False), hidden=128, inter=128),
    "w4-act-order": layer(scheme(act=True)),
    "w4-act-order-asym": layer(scheme(act=True, sym=False)),
    "w8-g32": layer(scheme(8)),
    "w8-channel": layer(scheme(8, -1)),
    "w8-group-is-channel": layer(scheme(8, 64), hidden=64),
    "w8-asym": layer(scheme(8, 64, sym=False)),
    "w8-channel-asym": layer(scheme(8, -1, sym=False)),
    "w8-act-order": layer(scheme(8, 32, act=True)),
    "mixed-bits": layer(scheme(), scheme(8, -1)),
    "mixed-groups": layer(scheme(group=64), scheme(group=32)),
    "bias": layer(has_bias=True),
    "w8-channel-bias": layer(scheme(8, -1), has_bias=True),
    "swigluoai-bias": layer(has_bias=True, activation=Activation("swigluoai")),
    "silu-limit": activated("silu", limit=0.5),
    "gelu": activated("gelu"),
    "gelu_tanh": activated("gelu_tanh"),
    "swigluoai": activated("swigluoai"),
    "swigluoai_uninterleave": activated("swigluoai_uninterleave", limit=1.0, alpha=1.5, beta=0.5),
    "swiglustep": activated("swiglustep"),
    "situ": activated("situ", beta=2.0),
    "situ-linear": activated("situ", beta=2.0, linear_beta=1.5),
    "silu_no_mul": activated("silu_no_mul"),
    "gelu_no_mul": activated("gelu_no_mul"),
    "gelu_tanh_no_mul": activated("gelu_tanh_no_mul"),
    "relu2_no_mul": activated("relu2_no_mul"),
    "weight-on-input": layer(top_k=1, router_weight_on_input=True),
    "top-1": layer(top_k=1),
    "top-3": layer(top_k=3),
    "fp16": layer(act_dtype="float16", w13=scheme(scales="float16")),
    "fp32": layer(act_dtype="float32"),
    "fp32-scales": layer(scheme(scales="float32")),
    "bf16-with-fp16-scales": layer(scheme(scales="float16")),
    "fp16-with-bf16-scales": layer(act_dtype="float16"),
    "fp16-w8-channel": layer(scheme(8, -1, scales="float16"), act_dtype="float16"),
    "one-group-in-w2": layer(scheme(group=128), hidden=512, inter=128),
    "hidden-160-inter-96": layer(hidden=160, inter=96),
    "inter-8": layer(scheme(group=8), hidden=160, inter=8),
    "inter-8-channel": layer(scheme(group=-1), hidden=160, inter=8),
    "w8-inter-8": layer(scheme(8, -1), hidden=160, inter=8),
    "odd-sizes": layer(scheme(group=-1), hidden=51, inter=17),
    "w8-odd-sizes": layer(scheme(8, -1), hidden=51, inter=17),
    "partial-last-group": layer(scheme(group=32), hidden=80, inter=48),
    "expert-parallel": layer(experts=8, local=4, top_k=4),
    "w8-expert-parallel": layer(scheme(8, -1), experts=8, local=2, top_k=4),
    "1-expert": layer(experts=1, top_k=1, hidden=64, inter=32),
    "60-experts": layer(experts=60, top_k=4, hidden=64, inter=32),
    "160-experts": layer(experts=160, top_k=6, hidden=64, inter=32),
    "256-experts": layer(experts=256, top_k=8, hidden=64, inter=32),
    "384-experts": layer(experts=384, top_k=8, hidden=64, inter=32),
}


@functools.cache
def device():
    return detect("cpu")


def extremes(experts: CanonicalExperts) -> CanonicalExperts:
    """The made-up weights with zero points at both ends of their range and one scale of 0."""

    def changed(weight):
        tensors = {"scales": weight.scales.clone()}
        tensors["scales"][0, 0, 0] = 0
        if weight.zero_points is not None:
            zeros = weight.zero_points.clone()
            zeros[0, 1:4, 0] = 0
            zeros[-1, 2:5, -1] = (1 << weight.scheme.num_bits) - 1
            tensors["zero_points"] = zeros
        return replace(weight, **tensors)

    return replace(experts, w13=changed(experts.w13), w2=changed(experts.w2))


@functools.cache
def experts_of(problem: Problem) -> CanonicalExperts:
    experts = extremes(RandomSource(problem, seed=7).load())
    canonical.check_experts(experts)
    return experts


@functools.cache
def cases_of(problem: Problem):
    # Hundreds of experts: three tokens of eight are sent to as many as matter here.
    counts = (1, 3) if problem.num_local_experts > 100 else (1, 3, 33)
    return make_cases(experts_of(problem), token_counts=counts)


def offered(name: str, key: str) -> bool:
    """Whether a pair is tested as supported; a rule that raises is, so that its test fails."""
    try:
        return bool(registry.get(name).supports(PROBLEMS[key], device()))
    except Exception:
        return True


#: Numbers of experts of published models; what packs and runs 60 and 384 takes these the same way.
SUPPORT_ONLY = {"160-experts", "256-experts"}


def pairs(keys=tuple(key for key in PROBLEMS if key not in SUPPORT_ONLY)):
    """(backend, problem) of every pair that this machine runs; the others are refusals."""
    return [
        pytest.param(name, key, id=f"{name}-{key}")
        for name in NAMES
        for key in keys
        if offered(name, key)
    ]


EDGES = ("w4-g32", "w8-channel", "fp16")
every_pair = pytest.mark.parametrize(("name", "key"), pairs())
edge_pairs = pytest.mark.parametrize(("name", "key"), pairs(EDGES))


def points(backend, problem: Problem):
    found = list(backend.space(problem, 16, device()))
    assert found, "a supported problem needs at least one legal point"
    return found


def packed_for(backend, problem: Problem, params):
    """Packed weights, or None where the layout says that the values do not fit it."""
    try:
        return backend.layout(problem, params).pack(experts_of(problem))
    except UnsupportedError:
        return None


def tensors_of(experts: CanonicalExperts):
    return {
        f"{name}.{key}": tensor
        for name, weight in (("w13", experts.w13), ("w2", experts.w2))
        for key, tensor in weight.tensors.items()
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture(autouse=True)
def _one_thread():
    """Small matrices on many threads measure the barrier; one test below varies the threads."""
    with one_thread():
        yield


def supported_by(name):
    backend = registry.get(name)
    return {key for key, problem in PROBLEMS.items() if backend.supports(problem, device())}


def test_the_emulation_takes_everything():
    assert supported_by("emulation") == set(PROBLEMS)


def test_what_pytorchs_own_operators_take():
    """Guards against a rule that refuses too much, which every other test here would pass."""
    int8 = {"w8-channel", "w8-group-is-channel", "w8-channel-bias", "fp16-w8-channel"}
    assert supported_by("torch_int8") == {*int8, "w8-expert-parallel"}
    never = {"w4-g16", "mixed-bits"}
    never |= {"inter-8", "inter-8-channel", "odd-sizes", "partial-last-group"}
    w4 = {key for key, problem in PROBLEMS.items() if problem.w13.num_bits == 4}
    assert supported_by("torch_int4") == w4 - never


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_gives_every_reason_with_found_and_required(name):
    backend = registry.get(name)
    for problem in PROBLEMS.values():
        support = backend.supports(problem, device())
        for reason in support.reasons:
            assert reason.what
            assert reason.found
            assert reason.required
            assert "\n" not in str(reason)
        available = backend.available(device())
        assert set(available.reasons) <= set(support.reasons)
        assert len(set(support.reasons)) == len(support.reasons)


@every_pair
def test_packing_is_pure_sized_and_invertible(name, key):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    experts = experts_of(problem)
    before = {k: t.clone() for k, t in tensors_of(experts).items()}
    packed_any = False
    for params in points(backend, problem):
        layout = backend.layout(problem, params)
        packed = packed_for(backend, problem, params)
        if packed is None:
            continue
        packed_any = True
        assert packed.problem == problem
        assert layout.nbytes(problem) == packed.nbytes
        assert packed.layout == layout.key
        for k, tensor in tensors_of(experts).items():
            assert same_bits(tensor, before[k]), f"pack changed {k}"
        for k, tensor in packed.tensors.items():
            if tensor.layout == torch.strided:
                shared = {t.untyped_storage().data_ptr() for t in tensors_of(experts).values()}
                assert tensor.untyped_storage().data_ptr() not in shared, f"{k} shares memory"
        if layout.invertible and not packed.meta.get("rounded"):
            back = layout.unpack(packed)
            assert back.problem == problem
            found = tensors_of(back)
            assert set(found) == set(before)
            for k, tensor in found.items():
                assert same_bits(tensor, before[k]), f"{layout.key}: {k} did not come back"
        elif not layout.invertible:
            with pytest.raises(UnsupportedError):
                layout.unpack(packed)
    assert packed_any, "a supported problem needs a layout that takes ordinary values"


@every_pair
def test_numbers_are_right(name, key):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    for params in points(backend, problem):
        packed = packed_for(backend, problem, params)
        if packed is not None:
            verdict = verify_candidate(backend, packed, params, cases_of(problem))
            assert verdict, f"{name} {params}: {verdict.reason}"


def fresh(problem: Problem, num_tokens: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, problem.hidden_size, generator=generator) / 2
    return x.to(torch_dtype(problem.act_dtype))


def run(backend, packed, x, routing, params, **rest):
    out = torch.full_like(x, float("nan"))
    result = apply(backend, packed, x, routing, params, out=out, **rest)
    assert result is out
    return out


@edge_pairs
def test_no_tokens(name, key):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    empty = torch.empty(0, problem.top_k)
    for params in points(backend, problem)[:1]:
        packed = packed_for(backend, problem, params)
        out = apply(backend, packed, fresh(problem, 0), Routing(empty.int(), empty), params)
        assert out.shape == (0, problem.hidden_size)
        assert out.dtype == torch_dtype(problem.act_dtype)


@edge_pairs
def test_tokens_of_experts_elsewhere_give_exact_zeros(name, key):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    x = fresh(problem, 5)
    ids = torch.full((5, problem.top_k), -1, dtype=torch.int32)
    weights = torch.full((5, problem.top_k), float("nan"))  # nothing may look at them
    for params in points(backend, problem):
        packed = packed_for(backend, problem, params)
        if packed is not None:
            assert not run(backend, packed, x, Routing(ids, weights), params).any()


@edge_pairs
@pytest.mark.parametrize("kind", ["one_hot:1", "all_but_one:1"])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 17, 64])
def test_hot_and_cold_experts_at_odd_token_counts(name, key, kind, num_tokens):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    x, routing = fresh(problem, num_tokens), make_routing(kind, num_tokens, problem, seed=2)
    judged = judge(x, experts_of(problem), routing)
    kept = x.clone(), routing.topk_ids.clone(), routing.topk_weights.clone()
    for params in points(backend, problem):
        packed = packed_for(backend, problem, params)
        if packed is None:
            continue
        accuracy = backend.accuracy(params)
        verdict = compare(
            run(backend, packed, x, routing, params),
            judged.reference,
            accuracy=accuracy,
            act_dtype=problem.act_dtype,
            scale=judged.scales[accuracy],
        )
        assert verdict, f"{params}: {verdict.reason}"
        for now, then in zip((x, routing.topk_ids, routing.topk_weights), kept, strict=True):
            assert same_bits(now, then)


@edge_pairs
@pytest.mark.parametrize("threads", [2])
def test_more_threads(name, key, threads):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    for params in points(backend, problem):
        packed = packed_for(backend, problem, params)
        torch.set_num_threads(threads)
        verdict = verify_candidate(backend, packed, params, cases_of(problem)[:3], repeats=1)
        torch.set_num_threads(1)
        assert verdict, f"{params}: {verdict.reason}"


@edge_pairs
def test_identical_rows_get_equal_answers(name, key):
    """64 equal rows agree with each other and with the row alone, within the tolerance."""
    problem = PROBLEMS[key]
    backend = registry.get(name)
    x, one = fresh(problem, 1), make_routing("uniform", 1, problem, seed=4)
    many = Routing(one.topk_ids.repeat(64, 1), one.topk_weights.repeat(64, 1))
    judged = judge(x, experts_of(problem), one)
    for params in points(backend, problem):
        packed = packed_for(backend, problem, params)
        if packed is None:
            continue
        accuracy = backend.accuracy(params)
        alone = run(backend, packed, x, one, params)
        rows = run(backend, packed, x.repeat(64, 1), many, params)
        for truth in (alone.double(), judged.reference):
            verdict = compare(
                rows,
                truth.repeat(64, 1),
                accuracy=accuracy,
                act_dtype=problem.act_dtype,
                scale=judged.scales[accuracy].repeat(64, 1),
            )
            assert verdict, f"{params}: {verdict.reason}"


@pytest.mark.parametrize(("name", "key"), pairs(("w4-g32",)))
def test_new_weights_at_a_used_address_are_seen(name, key):
    """A kernel that keeps copies of weights by address must not answer with the old ones."""
    problem = PROBLEMS[key]
    backend = registry.get(name)
    x, routing = fresh(problem, 5), make_routing("uniform", 5, problem, seed=5)
    for params in points(backend, problem):
        layout = backend.layout(problem, params)
        packed = layout.pack(experts_of(problem))
        run(backend, packed, x, routing, params)
        other = RandomSource(problem, seed=8).load()
        strided = {k: t for k, t in packed.tensors.items() if t.layout == torch.strided}
        if len(strided) < len(packed.tensors):
            continue  # opaque tensors cannot be written in place
        for key, tensor in layout.pack(other).tensors.items():
            packed.tensors[key].copy_(tensor)
        judged, accuracy = judge(x, other, routing), backend.accuracy(params)
        verdict = compare(
            run(backend, packed, x, routing, params),
            judged.reference,
            accuracy=accuracy,
            act_dtype=problem.act_dtype,
            scale=judged.scales[accuracy],
        )
        assert verdict, f"{params}: {verdict.reason}"


# ---- planted faults: the round trip or the reference must see each of them -----------------------


def _nibble(tensors):
    codes = tensors["w2.codes"].clone()
    codes[1, 3, 2] ^= 0x10 if codes.dtype == torch.int32 else 1
    return {"w2.codes": codes}


def _scale_row(tensors):
    scales = tensors["w13.scales"].clone()
    scales[2, 5] *= 1.5
    return {"w13.scales": scales}


def _zero_point(tensors):
    if "w13.zero_points" not in tensors:
        return {}
    zeros = tensors["w13.zero_points"].clone()
    zeros[1, 4, 1] ^= 1
    return {"w13.zero_points": zeros}


def _swapped_experts(tensors):
    swap = torch.tensor([1, 0, 2, 3])
    return {k: t[swap] for k, t in tensors.items() if k.startswith("w2.")}


def _gate_and_up(tensors):
    return {
        k: torch.cat(t.chunk(2, 1)[::-1], 1) for k, t in tensors.items() if k.startswith("w13.")
    }


FAULTS = {
    f.__name__.strip("_"): f
    for f in (_nibble, _scale_row, _zero_point, _swapped_experts, _gate_and_up)
}


def with_tensors(experts: CanonicalExperts, changes) -> CanonicalExperts:
    def changed(weight, prefix):
        mine = {k.removeprefix(prefix): t for k, t in changes.items() if k.startswith(prefix)}
        return replace(weight, **mine)

    return replace(experts, w13=changed(experts.w13, "w13."), w2=changed(experts.w2, "w2."))


@pytest.mark.parametrize(("name", "key"), pairs(("w4-g32", "w4-asym", "w8-channel")))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_layout_fault_is_seen(name, key, fault):
    """Packed weights with one fault fail the round trip (invertible layouts) or the judge."""
    problem = PROBLEMS[key]
    backend = registry.get(name)
    experts = experts_of(problem)
    changes = FAULTS[fault](tensors_of(experts))
    if not changes:
        return  # symmetric weights have no zero points
    faulty = with_tensors(experts, changes)
    for params in points(backend, problem):
        layout = backend.layout(problem, params)
        packed = layout.pack(faulty)
        if layout.invertible:
            back, truth = tensors_of(layout.unpack(packed)), tensors_of(experts)
            seen = any(not same_bits(back[k], truth[k]) for k in truth)
        else:
            seen = not verify_candidate(backend, packed, params, cases_of(problem))
            if fault in ("nibble", "zero_point"):
                # One weight of a dense copy is below 16-bit noise: the tensors themselves differ.
                good = layout.pack(experts)
                seen = any(
                    not torch.equal(_plain(packed.tensors[k]), _plain(good.tensors[k]))
                    for k in good.tensors
                )
        assert seen, f"{layout.key} {params}"


@pytest.mark.parametrize(("name", "key"), pairs(("w4-g32",)))
@pytest.mark.parametrize("fault", ["scale_row", "swapped_experts", "gate_and_up"])
def test_the_judge_alone_sees_faults_of_a_row_or_more(name, key, fault):
    problem = PROBLEMS[key]
    backend = registry.get(name)
    experts = experts_of(problem)
    faulty = with_tensors(experts, FAULTS[fault](tensors_of(experts)))
    for params in points(backend, problem):
        # One row of one expert is within the rounding of 8-bit activations.
        if fault != "scale_row" or backend.accuracy(params) == "exact":
            packed = backend.layout(problem, params).pack(faulty)
            assert not verify_candidate(backend, packed, params, cases_of(problem))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


@pytest.mark.parametrize(("name", "key"), pairs(("fp16-with-bf16-scales",)))
def test_values_that_a_type_cannot_hold_are_refused_or_right(name, key):
    """bf16 scales of 1e-8 and 70000 with fp16 activations: never silently 0 or infinite."""
    problem = PROBLEMS[key]
    backend = registry.get(name)
    experts = experts_of(problem)
    for value in (1e-8, 70000.0):
        scales = experts.w2.scales.clone()
        scales[1, 7, 0] = value
        changed = with_tensors(experts, {"w2.scales": scales})
        for params in points(backend, problem):
            layout = backend.layout(problem, params)
            try:
                packed = layout.pack(changed)
            except UnsupportedError:
                continue
            if layout.invertible:
                assert same_bits(tensors_of(layout.unpack(packed))["w2.scales"], scales)
            else:
                kept = packed.tensors.get("w2")
                kept = _plain(packed.tensors["w2.1"]) if kept is None else kept[1]
                truth = canonical.dequantize_expert(changed.w2, 1)[7]
                assert torch.allclose(kept.view(-1, 64)[7].float(), truth, rtol=1e-3, atol=0)
