"""Starting points are legal for any layer, and illegal points are refused before compilation."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
from autosel.backends.wna16_tiled import Wna16TiledBackend, _meta_launches, _meta_layer
from autosel.core import Activation, Device
from autosel.kernels import wna16_space
from autosel.kernels.wna16_layer import TiledLayer
from autosel.kernels.wna16_moe import layer_launches
from autosel.triton_offline import meta_call
from tests.kernels.make import make_problem

H200 = Device("cuda", "NVIDIA H200", (9, 0), 132)
TOKENS = (1, 2, 4, 8, 9, 16, 64, 256, 1024, 8192)
SIZES = [
    (128, 8, 2048, 768),
    (8, 2, 4096, 14336),
    (256, 8, 7168, 256),
    (64, 6, 2048, 1408),
    (128, 4, 2944, 2880 + 64),
    (16, 1, 5120, 8192),
    (32, 4, 128, 64),
    (512, 10, 2048, 512),
    (2, 2, 128, 256),
    (8, 2, 7168, 8192),
]


def layer(experts, top_k, hidden, inner, group, **more):
    tensors = {"w13": torch.empty(0), "w2": torch.empty(0)}
    return TiledLayer(tensors, experts, top_k, hidden, inner, group, group, **more)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_starting_points_are_legal(size):
    for group, tokens, bits, gluon in itertools.product((32, 64), TOKENS, (4, 8), (True, False)):
        made = layer(*size, group, bits13=bits, bits2=bits, gluon=gluon)
        start = wna16_space.starting_params(made, tokens)
        assert wna16_space.problem_with(made, start) is None, (group, tokens, bits, start)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_complete_setting_leaves_nothing_out_and_a_part_of_one_does(size):
    """What a call reads of a setting is seen by making its launches of just that."""
    problem = make_problem(size[0], size[2], size[3], size[1], group=128)
    for tokens in (1, 2, 8, 64, 4096):
        for design in Wna16TiledBackend().space(problem, tokens, H200).designs:
            point = dict(design.default)
            assert wna16_space.is_complete(point)
            read = ReadKeys(point)
            made = _meta_layer(problem, H200)
            x, routing, _ = meta_call(problem, tokens)
            x = torch.empty((tokens, made.hidden), dtype=x.dtype, device="meta")
            ids, weights = routing.topk_ids, routing.topk_weights
            layer_launches(made, x, ids, weights, torch.empty_like(x), read)
            for name in read.keys_read:
                left = {n: v for n, v in point.items() if n != name}
                assert not wna16_space.is_complete(left), name


class ReadKeys(dict):
    """A dict that remembers what was read of it and has to be there."""

    def __init__(self, values):
        super().__init__(values)
        self.keys_read = set()

    def __getitem__(self, name):
        self.keys_read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("tokens", TOKENS)
def test_backend_space_starts_legally_and_refuses(tokens):
    problem = make_problem(128, 2048, 768, 8, group=128)
    space = Wna16TiledBackend().space(problem, tokens, H200)
    assert space.constraint(space.default) is None
    assert all(name in space.default for name in space.choices)
    broken = dict(space.default)
    key = next(k for k in ("up_kw", "up_bn") if k in broken)
    assert space.constraint(broken | {key: 96}) is not None


@pytest.mark.parametrize("size", [(64, 8, 2048, 1024), (8, 2, 4096, 14336)], ids=str)
@pytest.mark.parametrize("chosen_for", [2, 4, 64, 4096])
def test_a_setting_is_the_same_at_every_token_count(size, chosen_for):
    """Neighbouring token counts, and those of verification, have other defaults."""
    experts, top_k, hidden, inner = size
    problem = make_problem(experts, hidden, inner, top_k, group=128)
    params = Wna16TiledBackend().space(problem, chosen_for, H200).default
    if params["path"] == "decode":
        pytest.skip("the decode kernels have no blocks")

    def gemms(tokens):
        launches = _meta_launches(problem, params, tokens, H200)
        fixed = ("TOK", "CLASSES", "BN", "BK", "KS", "KW", "R", "STAGES")
        options = [launch.options for launch in launches if "NR" in launch.options]
        return {tuple((name, o[name]) for name in fixed if name in o) for o in options}

    expected = gemms(chosen_for)
    assert expected
    assert all(dict(one).get("TOK", params.get("tok")) == params.get("tok") for one in expected)
    for tokens in (1, 3, 22, 512, 1024):
        assert gemms(tokens) == expected, tokens


def test_many_warps_on_one_small_product_are_refused():
    """They were wrong on a card, and were found so: one choice, one piece of K, 16 rows."""
    made = layer(16, 1, 5120, 2048, 128)
    start = wna16_space.starting_params(made, 1)
    lone = start | {"down_ks": 1, "down_kw": 64, "down_sub": 64, "down_r": 1, "down_warps": 8}
    assert wna16_space.problem_with(made, lone)[0] == "down_warps"
    assert wna16_space.problem_with(made, lone | {"down_warps": 4}) is None
    assert wna16_space.problem_with(made, lone | {"down_kw": 128}) is None
    two = layer(8, 2, 4096, 14336, 128)
    assert wna16_space.problem_with(two, wna16_space.starting_params(two, 1)) is None


def test_a_rank_of_expert_parallelism_starts_by_the_slots_that_it_serves():
    """DeepSeek-V3 over 8 and 128 ranks: of the 64 slots of 8 tokens 8, or half a one, are here."""
    for local in (32, 2):
        made, share = layer(local, 8, 7168, 2048, 128), local / 256
        paths = [wna16_space.starting_points(made, t, share)[0]["path"] for t in range(1, 2000)]
        assert paths[:8] == ["decode"] * 8
        changes = sum(a != b for a, b in itertools.pairwise(paths))
        assert changes <= 2, "more tokens go back to fewer tokens' path"
        for tokens in (1, 8, 64, 2000):
            for start in wna16_space.starting_points(made, tokens, share):
                assert wna16_space.problem_with(made, start) is None
    whole = layer(32, 8, 7168, 2048, 128)
    assert wna16_space.starting_points(whole, 8)[0]["path"] != "decode"


def test_rounds_of_the_ring_must_not_cut_groups():
    """Seven stages of 64 inputs with groups of 128 gave wrong numbers: found by checking."""
    made = layer(8, 2, 4096, 14336, 128)
    start = wna16_space.starting_params(made, 4096)
    assert start["down_with"] == "gluon"
    assert wna16_space.problem_with(made, start | {"down_stages": 7}) is not None


def test_support_names_what_is_wrong():
    backend = Wna16TiledBackend()
    assert backend.supports(make_problem(), H200)
    assert "group size" in str(backend.supports(make_problem(group=16), H200))
    assert "device" in str(backend.supports(make_problem(), Device("cpu", "some CPU")))
    old = Device("cuda", "T4", (7, 5), 40)
    assert "capability" in str(backend.supports(make_problem(), old))
    limited = make_problem(activation=Activation("silu", limit=7.0))
    assert backend.supports(limited, H200)
    assert backend.space(limited, 4096, H200).default["up_with"] == "triton"
