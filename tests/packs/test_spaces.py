"""What backends propose as settings can travel in a pack."""

from __future__ import annotations

from itertools import islice

import pytest

from autosel import registry
from autosel.core import Device, Problem, QuantScheme
from autosel.packs.fields import scalars
from autosel.search import first_points
from tests.backends.adapters import H200
from tests.fakes import CPU

GROUP_128 = QuantScheme(4, 128, True)
PROBLEMS = {
    "many experts": Problem(128, 128, 8, 2048, 768, GROUP_128, GROUP_128),
    "few experts": Problem(8, 8, 2, 4096, 14336, GROUP_128, GROUP_128),
}
#: Drawn points beyond the first ones of the space.
DRAWN = 24


@pytest.mark.parametrize("device", [H200, CPU], ids=["H200", "cpu"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("backend", registry.all_backends(), ids=lambda backend: backend.name)
def test_settings_can_be_packed(backend, problem: Problem, device: Device) -> None:
    for num_tokens in (1, 16, 300, 8192):
        space = backend.space(problem, num_tokens, device)
        points = [*islice(space, 8), *first_points(space, DRAWN, 0, [])]
        assert space.default in points or space.constraint(space.default)
        for point in points:
            assert scalars(dict(point), "params") == dict(point)
