"""The benchmark of few tokens varies the settings of one kernel at a time, all of them legal."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from autosel.kernels import wna16_space
from bench import few_tokens
from bench.moe_cases import meta_layer


@pytest.mark.parametrize("name", few_tokens.MODELS)
def test_one_kernel_varies_at_a_time(name: str) -> None:
    shape = few_tokens.MODELS[name]
    for tokens in few_tokens.TOKENS:
        starts = few_tokens.starts(shape, tokens)
        assert len({start["path"] for start in starts}) == len(starts)
        decode = [start for start in starts if start["path"] == "decode"]
        for pre in ("up", "down"):
            points = few_tokens.grid(shape, tokens, pre)
            assert bool(points) == bool(decode)
            for point in points:
                assert wna16_space.problem_with(meta_layer(shape), point) is None
                changed = {name for name in point if point[name] != decode[0][name]}
                assert all(name.startswith(pre) for name in changed)
            if decode:
                assert decode[0] in points
