"""The same with processes and torch.distributed: the layer sums over its group by itself."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from torch import distributed

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (distributed.is_available() and distributed.is_gloo_available()),
        reason="this torch is built without gloo",
    ),
]


@pytest.mark.parametrize("size", [2, 4])
def test_the_groups_sum_equals_the_uncut_layer(size, tmp_path, carried_dir):
    """On a clone's checkpoints, four ranks on every second; test_split.py, without processes, on
    each that there is.
    """
    rendezvous, answer = tmp_path / "rendezvous", tmp_path / "answer.json"
    words = [str(size), str(rendezvous), str(carried_dir), str(answer)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.layer.distributed_worker", *words],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as group:
        try:
            said = group.communicate(timeout=240)[1]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group.pid, signal.SIGKILL)
    assert group.returncode == 0, said
    errors = json.loads(answer.read_text())
    kinds = {name.split(" ", 1)[1] for name in errors}
    assert kinds == ({"tp", "ep"} if size == 2 else {"tp", "ep", "tp2 ep2"})
    assert {name: error for name, error in errors.items() if not error < 5e-6} == {}
