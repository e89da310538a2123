"""Candidates that misbehave, each in one way, registered as ordinary backends would be."""

import math
from dataclasses import replace

import pytest
import torch

from autosel.canonical import dequantize_expert
from autosel.core import Activation, QuantScheme, Routing
from autosel.error_scale import judge
from autosel.interfaces import PackedExperts
from autosel.verify import LIMITS, fingerprint, make_cases, verify_candidate
from tests.verify.layers import Truthful, layer, pack, problem, with_tensors

P = problem(8, 2, 128, 64, QuantScheme(4, 32, False))
EXPERTS = layer(P)
CASES = make_cases(EXPERTS, token_counts=(1, 17))


def verify(backend, packed=None, cases=CASES, **more):
    return verify_candidate(backend, packed or pack(EXPERTS), {}, cases, **more)


def changed(name, change):
    """A backend whose output goes through ``change(out, x, routing)``."""

    class Changed(Truthful):
        def run(self, packed, x, routing, params, out):
            out.copy_(self.output(packed, x, routing))
            change(out, x, routing)
            return out

    Changed.name = name
    return Changed()


def test_a_correct_candidate_passes():
    verdict = verify(Truthful(), experts=EXPERTS)
    assert verdict.status == "ok"
    assert verdict.reason == ""
    assert 0.2 < verdict.score < 0.6
    assert verdict.audit_score < 4
    assert verdict.repeatable is True
    assert not verdict.weights_changed
    assert verdict.cases == tuple(case.name for case in CASES)
    assert 1e-3 < verdict.errors.rel_rms < 1e-2


@pytest.mark.parametrize(
    "p",
    [
        problem(16, 4, 64, 32, local=2),
        problem(6, 2, 64, 32, local=2),
        problem(1, 1, 64, 32),
        problem(60, 4, 64, 32),
        problem(4, 2, 64, 32, activation=Activation("relu2_no_mul"), has_bias=True),
        problem(4, 2, 64, 32, activation=Activation("swigluoai"), act_dtype="float16"),
        problem(4, 1, 64, 32, router_weight_on_input=True),
        problem(4, 2, 160, 96, act_dtype="float32"),
        problem(4, 2, 160, 8),
        problem(4, 2, 64, 32, QuantScheme(8, -1, True), QuantScheme(4, 32, True)),
        problem(4, 2, 64, 32, QuantScheme(4, 32, True, has_g_idx=True, scale_dtype="float16")),
        problem(4, 4, 64, 32),
    ],
    ids=lambda p: p.key,
)
def test_correct_candidates_of_every_kind_pass(p):
    experts = layer(p)
    cases = make_cases(experts, token_counts=(1, 17))
    verdict = verify_candidate(Truthful(), pack(experts), {}, cases, experts=experts)
    assert verdict.status == "ok", verdict.reason
    assert verdict.score < 0.65


def test_every_local_expert_is_hit_and_every_kind_of_slot_occurs():
    for p, rank in ((P, 0), (problem(16, 4, 64, 32, local=2), 3), (problem(60, 4, 64, 32), 0)):
        cases = make_cases(layer(p), token_counts=(1, 17), rank=rank)
        held = range(rank * p.num_local_experts, (rank + 1) * p.num_local_experts)
        by_name = {case.name: case for case in cases}
        every = by_name["every expert"].routing.topk_ids
        assert all((every == e).sum() >= 2 for e in held)
        alone = by_name["each expert alone"].routing.topk_ids
        assert alone[:, 0].tolist() == list(held)
        assert (alone[:, 1:] == -1).all()
        stray = by_name["stray slots"].routing.topk_ids
        assert {-1, -5, p.num_experts, 2**31 - 1} <= set(stray.flatten().tolist())
        assert (stray[3, 0] == stray[3, 1]).item()
        assert (by_name["nothing here"].judged.reference == 0).all()
        served = torch.cat([c.judged.reference for c in cases if c.name != "nothing here"])
        assert served.isfinite().all()
        assert not any(case.judged.overflows.any() for case in cases)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_inputs_have_a_realistic_size(factor):
    """Whatever the scales, the first GEMM gives numbers of order 1."""
    w13 = replace(EXPERTS.w13, scales=EXPERTS.w13.scales * factor)
    experts = replace(EXPERTS, w13=w13)
    x = make_cases(experts, token_counts=(17,))[0].x.float()
    for expert in range(P.num_experts):
        h = x @ dequantize_expert(w13, expert).T
        assert 0.3 < h.square().mean().sqrt() < 1.5


def extreme_scales(change):
    scales = EXPERTS.w13.scales.clone()
    change(scales)
    return replace(EXPERTS, w13=replace(EXPERTS.w13, scales=scales))


def far_apart(scales):
    scales[1] *= 1e-6
    scales[2] *= 1e4


def one_group_of_zeros(scales):
    scales[3, 5, 1] = 0


def all_zeros(scales):
    scales.zero_()


def nearly_nothing(scales):
    scales *= 1e-20


@pytest.mark.parametrize("change", [far_apart, one_group_of_zeros, all_zeros, nearly_nothing])
def test_extreme_scales(change):
    experts = extreme_scales(change)
    cases = make_cases(experts, token_counts=(1, 17))
    verdict = verify_candidate(Truthful(), pack(experts), {}, cases, experts=experts)
    assert verdict.status == "ok", verdict.reason
    assert verdict.score < 0.6
    assert verdict.audit_score < 4
    if change is far_apart:
        # The faults of a small expert are seen as well as those of a large one.
        packed = pack(experts)
        packed.tensors["w13.codes"][1] = packed.tensors["w13.codes"][0]
        assert verify_candidate(Truthful(), packed, {}, cases).status == "wrong"


class HalfWritten(Truthful):
    name = "half"

    def run(self, packed, x, routing, params, out):
        full = self.output(packed, x, routing)
        columns = out.shape[1] // 2
        out[:, :columns] = full[:, :columns]
        return out


def test_a_half_that_is_not_written_whatever_ran_before():
    for order in ([Truthful(), HalfWritten()], [HalfWritten(), Truthful()]):
        verdicts = {b.name: verify(b) for b in order}
        assert verdicts["truthful"].status == "ok"
        assert verdicts["half"].status == "wrong"
        assert "unwritten elements: found 64 of 128 left" in verdicts["half"].reason


def test_last_rows_not_written():
    class LastTile(Truthful):
        name = "tile"

        def run(self, packed, x, routing, params, out):
            full = self.output(packed, x, routing)
            whole = len(x) // 16 * 16 if len(x) > 16 else len(x)
            out[:whole] = full[:whole]
            return out

    verdict = verify(LastTile())
    assert verdict.status == "wrong"
    assert verdict.reason.startswith("uniform M=17: output: unwritten elements: found 128 of 2176")
    assert "first at token 16 output 0" in verdict.reason
    assert verdict.cases == ("uniform M=1", "uniform M=17")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("everywhere", [False, True])
def test_non_finite_outputs(bad, everywhere):
    def change(out, x, routing):
        out[... if everywhere else (0, 3)] = bad

    verdict = verify(changed("bad", change))
    assert verdict.status == "nonfinite"
    assert "output: non-finite" in verdict.reason
    assert verdict.errors is None


def test_overflow_in_half_precision_is_reported_as_such():
    """Gate and up outputs of 300 multiply to 90000, which float16 cannot hold."""
    for act_dtype, status in (("float16", "nonfinite"), ("bfloat16", "ok")):
        experts = layer(problem(2, 1, 64, 32, act_dtype=act_dtype))
        big = [scaled_up(case, experts) for case in make_cases(experts, token_counts=(1, 17))[:2]]
        verdict = verify_candidate(Truthful(), pack(experts), {}, big)
        assert verdict.status == status, verdict.reason
        if status == "nonfinite":
            assert "it overflows float16: a number on the way is above 65504" in verdict.reason


def scaled_up(case, experts):
    """Activations 300 times as large, and router weights that bring the result back into range."""
    x = case.x * 300
    routing = Routing(case.routing.topk_ids, case.routing.topk_weights * 1e-4)
    judged = judge(x, experts, routing)
    assert judged.reference.abs().max() < 65504
    return replace(case, x=x, routing=routing, judged=judged)


def test_inputs_are_the_same_for_the_next_candidate():
    class Doubling(Truthful):
        name = "doubling"

        def run(self, packed, x, routing, params, out):
            x.mul_(2)
            routing.topk_ids.fill_(0)
            routing.topk_weights.fill_(1)
            return super().run(packed, x, routing, params, out)

    class Restless(Truthful):
        """Right numbers, but it leaves other activations behind."""

        name = "restless"

        def run(self, packed, x, routing, params, out):
            super().run(packed, x, routing, params, out)
            x.neg_()
            return out

    before = [(c.x.clone(), c.routing.topk_ids.clone()) for c in CASES]
    for backend in (Doubling(), Restless()):
        verdict = verify(backend)
        assert verdict.status == "wrong"
        assert verdict.reason == "uniform M=1: it changed its input x"
    for (x, ids), case in zip(before, CASES, strict=True):
        assert torch.equal(x, case.x)
        assert torch.equal(ids, case.routing.topk_ids)
    assert verify(Truthful()).status == "ok"


@pytest.mark.parametrize("change", ["one word", "exchange", "one byte"])
def test_packed_weights_are_watched(change):
    class Shuffling(Truthful):
        name = "shuffling"

        def run(self, packed, x, routing, params, out):
            super().run(packed, x, routing, params, out)
            words = packed.tensors["w13.codes"].view(-1)
            if change == "one word":
                words[7] += 1
            elif change == "exchange":
                words[[3, 9]] = words[[9, 3]]
            else:
                packed.tensors["w13.zero_points"].view(-1)[5] += 1
            return out

    verdict = verify(Shuffling(), cases=CASES[:1], repeats=1)
    assert verdict.status == "wrong"
    assert verdict.weights_changed
    assert verdict.reason.startswith("it changed its packed weights: w13.")


def test_a_write_outside_the_output():
    class Spilling(Truthful):
        name = "spilling"

        def run(self, packed, x, routing, params, out):
            super().run(packed, x, routing, params, out)
            beyond = torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel())
            beyond.fill_(1)
            return out

    verdict = verify(Spilling())
    assert verdict.status == "wrong"
    assert "output: writes outside it: found 1 elements, expected none" in verdict.reason


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (RuntimeError("no kernel image\nand a long trace"), "failed", "RuntimeError: no kernel im"),
        (MemoryError(), "oom", "MemoryError"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom", "CUDA out of memory"),
        (ZeroDivisionError(), "failed", "ZeroDivisionError"),
    ],
)
def test_exceptions_become_verdicts(error, status, reason):
    class Raising(Truthful):
        name = "raising"

        def run(self, packed, x, routing, params, out):
            raise error

    verdict = verify(Raising())
    assert verdict.status == status
    assert verdict.reason.startswith(f"uniform M=1: {reason}")
    assert "\n" not in verdict.reason


def test_a_candidate_that_returns_something_else():
    class Own(Truthful):
        name = "own"

        def run(self, packed, x, routing, params, out):
            return self.output(packed, x, routing)

    verdict = verify(Own())
    assert verdict.status == "failed"
    assert "backend own: returned" in verdict.reason


def test_what_is_not_repeatable_is_said():
    class Moody(Truthful):
        name = "moody"
        turn = 0

        def run(self, packed, x, routing, params, out):
            super().run(packed, x, routing, params, out)
            Moody.turn += 1
            # One unit in the last place: right each time, and never the same.
            if out[0, 0] != 0:
                out.view(torch.int16)[0, 0] += self.turn % 2
            return out

    verdict = verify(Moody())
    assert verdict.status == "ok"
    assert verdict.repeatable is False
    assert verify(Moody(), repeats=1).repeatable is None


def test_a_fault_in_the_second_run_only():
    class SecondRun(Truthful):
        name = "second"
        turn = 0

        def run(self, packed, x, routing, params, out):
            super().run(packed, x, routing, params, out)
            SecondRun.turn += 1
            if self.turn == 2:
                out[0, 0] += 100
            return out

    assert verify(SecondRun()).status == "wrong"


class Off(Truthful):
    """Errors of ``share`` of the rms limit in every element, in units of the error scale."""

    name = "off"

    def __init__(self, share):
        self.share = share

    def run(self, packed, x, routing, params, out):
        case = next(c for c in CASES if torch.equal(c.x, x))
        sign = 1 - 2 * (torch.arange(out.numel()) % 2).double().reshape(out.shape)
        units = self.share * LIMITS["exact"].rms * sign
        return out.copy_(case.judged.reference + units * case.judged.scales["exact"])


@pytest.mark.parametrize(("share", "status"), [(0.5, "ok"), (1.5, "wrong")])
def test_errors_around_the_limit(share, status):
    verdict = verify(Off(share))
    assert verdict.status == status
    if status == "wrong":
        assert "error over rounding: found 3" in verdict.reason


def code_of(packed, name, change):
    tensor = packed.tensors[name.replace("_", ".", 1)].clone()
    change(tensor)
    return with_tensors(packed, **{name: tensor})


def one_nibble(codes):
    codes[3, 17, 5] ^= 0x8 << 12


def one_zero(zeros):
    zeros[5, 20, 1] += 1


def exchange_halves(codes):
    codes.copy_(codes.roll(64, dims=1))


def neighbour(codes):
    codes[2] = codes[3]


def shift_row(scales):
    scales[4] = scales[4].roll(1, dims=0)


def shift_group(scales):
    scales[4] = scales[4].roll(1, dims=1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w13_codes", one_nibble),
        ("w2_codes", one_nibble),
        ("w13_zero_points", one_zero),
        ("w2_zero_points", one_zero),
        ("w13_codes", exchange_halves),
        ("w13_codes", neighbour),
        ("w13_scales", shift_row),
        ("w2_scales", shift_row),
        ("w13_scales", shift_group),
        ("w2_scales", shift_group),
    ],
    ids=lambda v: v if isinstance(v, str) else v.__name__,
)
def test_faults_planted_in_the_packed_weights(name, change):
    verdict = verify(Truthful(), code_of(pack(EXPERTS), name, change), experts=EXPERTS)
    assert verdict.status == "wrong", verdict
    assert verdict.score > 1


def drop_a_slot(routing):
    ids = routing.topk_ids.clone()
    ids[-1, 0] = -1
    return Routing(ids, routing.topk_weights)


def double_the_weights(routing):
    return Routing(routing.topk_ids, routing.topk_weights * 2)


def half_precision_of_eighths(routing):
    return Routing(routing.topk_ids, (routing.topk_weights * 8).round() / 8)


def wrap_minus_one(routing):
    return Routing(routing.topk_ids.remainder(P.num_experts).to(torch.int32), routing.topk_weights)


def lose_duplicates(routing):
    ids = routing.topk_ids.clone()
    ids[ids[:, 0] == ids[:, 1], 1] = -1
    return Routing(ids, routing.topk_weights)


def exchange_weights(routing):
    return Routing(routing.topk_ids, routing.topk_weights.flip(1).contiguous())


@pytest.mark.parametrize(
    "change",
    [
        drop_a_slot,
        double_the_weights,
        half_precision_of_eighths,
        wrap_minus_one,
        lose_duplicates,
        exchange_weights,
    ],
)
def test_faults_planted_in_the_routing(change):
    class Misrouted(Truthful):
        name = "misrouted"

        def run(self, packed, x, routing, params, out):
            routing = change(routing)
            if change is wrap_minus_one:
                # What indexing with -1 does: the last expert, with the slot's weight.
                weights = torch.where(routing.topk_weights == 0, 0.25, routing.topk_weights)
                routing = Routing(routing.topk_ids, weights)
            return super().run(packed, x, routing, params, out)

    verdict = verify(Misrouted())
    assert verdict.status == "wrong", verdict


def test_only_the_first_of_identical_rows_is_right():
    def change(out, x, routing):
        if len(x) > 1 and torch.equal(x[0], x[-1]):
            out[1:] = out[1:].roll(1, dims=1)

    verdict = verify(changed("first row", change))
    assert verdict.status == "wrong"
    assert verdict.reason.startswith("identical tokens: ")


def test_stale_memory_under_slots_served_elsewhere():
    def change(out, x, routing):
        out[(routing.topk_ids < 0).all(dim=1)] = torch.empty_like(out).fill_(1e-3)[:1]

    verdict = verify(changed("stale", change))
    assert verdict.status == "wrong"
    assert verdict.reason.startswith(("stray slots: token", "nothing here: token"))


def test_the_two_accuracy_classes():
    """8-bit activations are wrong as exact and right as what they are."""

    class Int8(Truthful):
        name = "int8"

        def accuracy(self, params):
            return "a8" if params.get("honest") else "exact"

        def run(self, packed, x, routing, params, out):
            step = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
            rounded = ((x.float() / step).round() * step).to(x.dtype)
            return super().run(packed, rounded, routing, params, out)

    packed = pack(EXPERTS)
    assert verify_candidate(Int8(), packed, {}, CASES).status == "wrong"
    verdict = verify_candidate(Int8(), packed, {"honest": True}, CASES, experts=EXPERTS)
    assert verdict.status == "ok", verdict.reason


def test_fingerprints():
    base = torch.arange(3_000_000, dtype=torch.int32)
    found = {fingerprint(base)}
    for place in (0, 1, 1 << 20, 2_999_999):
        other = base.clone()
        other[place] ^= 1
        found.add(fingerprint(other))
    swapped = base.clone()
    swapped[[5, 2_500_000]] = swapped[[2_500_000, 5]]
    found.add(fingerprint(swapped))
    assert len(found) == 6
    assert fingerprint(base.clone()) == fingerprint(base)
    odd = torch.arange(7, dtype=torch.uint8)
    assert fingerprint(odd) != fingerprint(odd.flip(0))
    assert fingerprint(odd[1:]) == fingerprint(odd[1:].clone())
    assert fingerprint(torch.empty(0)) == 0
    square = torch.arange(16.0).reshape(4, 4)
    assert fingerprint(square.T) == fingerprint(square.T.contiguous())


def test_weights_in_an_opaque_layout_are_watched_too():
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    opaque = torch.randn(64, 64).to_mkldnn()
    packed = PackedExperts("opaque", P, {"w": opaque})
    assert fingerprint(packed.tensors["w"]) == fingerprint(opaque.to_dense())
