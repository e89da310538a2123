"""A gloo group, forked from here: every checkpoint's layer, cut over it, summed by the layer.

Called with: world size, file for the rendezvous, fixtures folder, file for the answer. The exit
status is the number of ranks that failed.
"""

import json
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed

from autosel import FusedMoE


def layers_of(root: Path) -> list[tuple[Path, int]]:
    manifest = json.loads((root / "checkpoints" / "manifest.json").read_text())
    return [(root / "checkpoints" / item["name"], item["moe_layers"][0]) for item in manifest]


def splits(rank: int, size: int) -> dict[str, dict[str, int]]:
    found = {
        "tp": {"tp_rank": rank, "tp_size": size},
        "ep": {"ep_rank": rank, "ep_size": size},
    }
    if size == 4:
        found["tp2 ep2"] = {
            "tp_rank": rank % 2, "tp_size": 2, "ep_rank": rank // 2, "ep_size": 2,
        }  # fmt: skip
    return found


def main(rank: int, size: int, rendezvous: str, root: str, answer: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    found = {}
    for path, index in layers_of(Path(root))[:: 2 if size == 4 else 1]:
        expected = load_file(path / "expected" / "expected.safetensors")
        at = f"layers.{index}."
        call = expected[at + "input"], expected[at + "topk_ids"], expected[at + "topk_weights"]
        whole = FusedMoE.from_checkpoint(path, index, act_dtype="float32", db=":memory:")
        uncut = whole(*call)
        for name, split in splits(rank, size).items():
            if split.get("ep_size", 1) > whole.problem.num_experts:
                continue
            layer = FusedMoE.from_checkpoint(
                path,
                index,
                act_dtype="float32",
                db=":memory:",
                reduce_group=distributed.group.WORLD,
                **split,
            )
            out = layer(*call)
            error = float((out - uncut).norm() / uncut.norm())
            found[f"{path.name} {name}"] = error
    if rank == size - 1:
        Path(answer).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def start(rank: int, size: int, *words: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            main(rank, size, *words)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


if __name__ == "__main__":
    ranks = [start(rank, int(sys.argv[1]), *sys.argv[2:]) for rank in range(int(sys.argv[1]))]
    sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in ranks))
