"""Two GPUs and NCCL: the layer sums over its group by itself, also inside a CUDA graph."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]
DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"CUDA devices: found {DEVICES}, needs 2"),
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_nccl_available()),
        reason="this torch is built without NCCL",
    ),
]


def test_two_ranks_sum_to_the_uncut_layer(tmp_path, fixtures_dir):
    rendezvous, answer = tmp_path / "rendezvous", tmp_path / "answer.json"
    words = ["2", str(rendezvous), str(fixtures_dir), str(answer)]
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.layer.nccl_worker", str(rank), *words],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=280)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], said
    errors = json.loads(answer.read_text())
    kinds = {name.split(": ")[1] for name in errors}
    assert kinds == {"tp", "ep", "tp in a graph", "ep in a graph"}
    assert {name: error for name, error in errors.items() if not error < 2e-2} == {}
