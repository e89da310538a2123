"""What serves a layer that is not tuned."""

import pytest

from autosel import native
from autosel.core import Device, Problem, QuantScheme
from autosel.fallback import DEFAULTS, fallback

SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(8, 8, 2, 64, 64, SCHEME, SCHEME)
CPU = Device("cpu", "some CPU", flags=("avx2",), threads=2)


def test_our_kernel_serves_a_cpu_with_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: "/usr/bin/c++")
    assert fallback(PROBLEM, CPU).key == "cpu_native[dot=fp32]"


def test_the_emulation_serves_a_cpu_without_one(monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    assert fallback(PROBLEM, CPU).backend == "emulation"


@pytest.mark.parametrize("failed", [{"cpu_native"}, set(DEFAULTS)])
def test_what_failed_serves_nothing(failed):
    assert fallback(PROBLEM, CPU, failed=failed).backend == "emulation"
