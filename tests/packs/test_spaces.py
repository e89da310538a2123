"""What backends propose as settings can travel in a pack."""

from __future__ import annotations

from itertools import islice

import pytest

from autosel import registry
from autosel.core import Candidate, Device, Problem, QuantScheme
from autosel.packs.fields import scalars
from autosel.packs.library import why_illegal
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


@pytest.mark.parametrize("num_tokens", [4, 16])
def test_settings_of_every_design_are_the_backends_own_and_mixed_ones_are_not(num_tokens) -> None:
    """A pack's choice for skewed routing may be a design that the backend does not start with."""
    backend, problem = registry.get("wna16_tiled"), PROBLEMS["few experts"]
    space = backend.space(problem, num_tokens, H200)
    assert len(space.designs) > 1
    layout = backend.layout(problem, space.default).key

    def why(params) -> str:
        candidate = Candidate.of(backend.name, params, layout)
        return why_illegal(candidate, problem, H200, num_tokens)

    for design in space.designs:
        assert why(design.default) == ""
        name = next(iter(design.choices))
        assert f"{name}=77 here" in why(design.default | {name: 77})
    first, second = (design.default for design in space.designs[:2])
    assert "has no parameter path=" in why(first | {"path": second["path"]})
    assert "has no parameter code here" in why(first | {"code": 1})
