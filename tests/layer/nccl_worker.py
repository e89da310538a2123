"""One process of an NCCL group: real checkpoints' layers on its GPU, cut over the group.

Called with: rank, world size, file for the rendezvous, fixtures folder, file for the answer.
"""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import distributed

from autosel import FusedMoE
from tests.layer.distributed_worker import layers_of, splits


def captured(layer: FusedMoE, call: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a graph of one call, the sum over the ranks included, gives at its second replay."""
    out = torch.empty_like(call[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(*call, out=out)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(*call, out=out)
    for _ in range(2):
        out.zero_()
        graph.replay()
    torch.cuda.synchronize()
    return out


def main(rank: int, size: int, rendezvous: str, root: str, answer: str) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not allowed everywhere
    torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
        device_id=torch.device("cuda", rank),
    )
    found = {}
    for path, index in layers_of(Path(root))[:4]:
        expected = load_file(path / "expected" / "expected.safetensors")
        at = f"layers.{index}."
        x, ids, weights = (expected[at + n] for n in ("input", "topk_ids", "topk_weights"))
        options = {"device": f"cuda:{rank}", "act_dtype": "bfloat16", "db": ":memory:"}
        call = (x.bfloat16().cuda(), ids.cuda(), weights.cuda())
        uncut = FusedMoE.from_checkpoint(path, index, **options)(*call)
        for name, split in splits(rank, size).items():
            layer = FusedMoE.from_checkpoint(
                path, index, reduce_group=distributed.group.WORLD, **options, **split
            )
            for kind, out in ((name, layer(*call)), (f"{name} in a graph", captured(layer, call))):
                error = (out.float() - uncut.float()).norm() / uncut.float().norm()
                found[f"{path.name}: {kind}"] = float(error)
    if rank == size - 1:
        Path(answer).write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
