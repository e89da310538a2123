"""Routing from a file of recorded topk ids: what is read, what is refused, and the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from autosel import routing_file
from autosel.errors import RoutingError
from autosel.routing_synthetic import make_routing
from autosel.tune_types import SweepSettings
from tests.fakes import PROBLEM

IDS = [[token % 4, (token + 1 + token // 4 % 3) % 4] for token in range(12)]


def write(path: Path, ids: Any = IDS) -> Path:
    if path.suffix == ".csv":
        path.write_text("\n".join(",".join(map(str, row)) for row in ids), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ids), encoding="utf-8")
    else:
        save_file({"topk_ids": np.array(ids, dtype=np.int64)}, path)
    return path


def test_one_traffic_has_one_key_in_every_format_and_under_every_name(tmp_path: Path) -> None:
    names = ("a.csv", "b.csv", "c.json", "d.safetensors")
    keys = {SweepSettings(routing=f"file:{write(tmp_path / n)}").routing for n in names}
    assert len(keys) == 1
    (key,) = keys
    assert key.startswith("recorded:")
    other = write(tmp_path / "e.csv", [row[::-1] for row in IDS])
    assert routing_file.load(str(other)) != key
    header = tmp_path / "f.csv"
    header.write_text("slot0,slot1\n" + (tmp_path / "a.csv").read_text(), encoding="utf-8")
    assert routing_file.load(str(header)) == key


def test_a_routing_is_consecutive_rows_of_the_recording(tmp_path: Path) -> None:
    key = routing_file.load(str(write(tmp_path / "a.csv")))
    for seed in range(5):
        ids = make_routing(key, 30, PROBLEM, seed=seed).topk_ids.tolist()
        start = IDS.index(ids[0])
        assert ids == [IDS[(start + token) % 12] for token in range(30)]
    starts = {make_routing(key, 1, PROBLEM, seed=s).topk_ids.tolist()[0][0] for s in range(20)}
    assert len(starts) > 1, "the seed moves the start"
    found = make_routing(key, 5, PROBLEM, seed=3)
    assert torch.equal(found.topk_ids, make_routing(key, 5, PROBLEM, seed=3).topk_ids)
    assert found.topk_ids.dtype == torch.int32
    assert ((found.topk_weights.sum(dim=1) >= 0.5) & (found.topk_weights.sum(dim=1) < 1)).all()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "1,2", "name"),
        ("a.pkl", b"\x80\x04.", "name"),
        ("a.csv", "", "shape"),
        ("a.csv", "0,1\n2", "rows of expert ids|as many ids"),
        ("a.csv", "0,x\n1,2\n3,y", "rows of expert ids"),
        ("a.csv", "0,1\n-1,2", "0 to"),
        ("a.csv", "0,99999999999999999999999\n0,1", "whole numbers|0 to|rows of expert ids"),
        ("a.csv", "0,1\n2,2", r"token 1: found \[2, 2\], expected different experts"),
        ("a.csv", b"\xff\xfe\x00", "rows of expert ids"),
        ("a.json", "[[0, 1], [2]]", "rows of expert ids|as many ids"),
        ("a.json", "[[0.5, 1.0]]", "whole numbers"),
        ("a.json", '{"topk_ids": 3}', "shape"),
        ("a.json", "[" * 100_000, "rows of expert ids"),
        ("a.json", "[[true, false]]", "whole numbers"),
        ("a.safetensors", b"\xff" * 64, "rows of expert ids"),
    ],
)
def test_a_file_that_will_not_do_is_one_line(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RoutingError, match=words) as caught:
        SweepSettings(routing=f"file:{path}")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_or_too_large_files_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RoutingError, match="No such file"):
        routing_file.load(str(tmp_path / "no.csv"))
    monkeypatch.setattr(routing_file, "MAX_BYTES", 4)
    with pytest.raises(RoutingError, match="at most 4"):
        routing_file.load(str(write(tmp_path / "a.csv")))


def test_traffic_of_another_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    wide = routing_file.load(str(write(tmp_path / "wide.csv", [[0, 1, 2]])))
    with pytest.raises(RoutingError, match="slots a token: found 3, expected 2"):
        make_routing(wide, 0, PROBLEM)
    large = routing_file.load(str(write(tmp_path / "large.csv", [[0, 9]])))
    with pytest.raises(RoutingError, match="expert: found 9, expected 0 to 3"):
        make_routing(large, 0, PROBLEM)


def test_a_key_without_its_file_says_how_to_give_it() -> None:
    with pytest.raises(RoutingError, match="only its key, expected file:PATH"):
        make_routing("recorded:0123456789abcdef", 1, PROBLEM)


def test_what_is_known_here(tmp_path: Path) -> None:
    """Reports leave out the roofline of a recording that this process has not read."""
    assert routing_file.is_known("zipf:1.2")
    assert not routing_file.is_known("recorded:fedcba9876543210")
    assert routing_file.is_known(routing_file.load(str(write(tmp_path / "a.csv"))))
