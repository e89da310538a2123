"""The library of planted faults: every one is caught by what a sweep runs, nothing correct is.

``python -m bench.planted_faults`` runs all of them in every backend, and 200 seeds.
"""

import pytest

from autosel.device import detect
from autosel.verify_suite import Suite
from bench import planted_faults
from bench.faults import FAULTS
from bench.planted_faults import correct, experts_of, judged, plant

DEVICE = detect("cpu")

#: What only the full set, or the sum over all cases, sees; the rest shows within a few calls.
SUBTLE = {"race", "one NaN", "tanh gelu", "truncation", "biased rounding", "silu in bf16"}


def test_the_library_is_large_and_its_names_are_its_own():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 40
    assert all((f.weights, f.call, f.kernel).count(None) == 2 for f in FAULTS)
    assert set(names) >= SUBTLE


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_each_fault_is_caught(fault):
    name = "kernel" if fault.where == "kernel" else "emulation"
    (row,) = plant(fault, DEVICE, (name,))
    assert row.certificate.status in ("wrong", "nonfinite"), row.certificate
    assert row.caught_by
    if fault.name not in SUBTLE:
        assert row.certificate.runs < 120


@pytest.mark.parametrize("fault", ["nibble swap", "zero point", "act-order index"])
@pytest.mark.parametrize("backend", ["cpu_native", "marlin"])
def test_faults_of_packing_are_caught_in_real_layouts(fault, backend):
    (chosen,) = [found for found in FAULTS if found.name == fault]
    rows = list(plant(chosen, DEVICE, (backend,)))
    if not rows:
        pytest.skip(f"{backend} does not run here")
    assert rows[0].certificate.status == "wrong"


@pytest.mark.parametrize("seed", range(8))
def test_correct_backends_pass(seed):
    """Among them weights of one sign, of one sign pattern and all equal, in every act dtype."""
    suite = Suite(experts_of(seed), seed=seed)
    passed = []
    for name in ("kernel", "int8_kernel", "emulation"):
        certificate = judged(correct(name), suite, DEVICE, level="quick")
        assert certificate.status == "ok", (name, certificate.reason)
        passed.append(certificate.score)
    assert all(0 < score < 0.8 for score in passed)


def test_seeds_differ_and_cover_every_kind():
    problems = [planted_faults.problem_of(seed) for seed in range(200)]
    assert len({p.key for p in problems}) > 100
    assert {p.act_dtype for p in problems} == {"bfloat16", "float16", "float32"}
    assert {p.w13.num_bits for p in problems} == {4, 8}
    assert any(p.w13.has_g_idx for p in problems)
    assert any(not p.w13.symmetric for p in problems)
    assert any(p.num_local_experts < p.num_experts for p in problems)
