"""Runs in a process that has vLLM: ``layers``, ``rank`` or ``generate``; prints one JSON line.

vLLM's CPU build takes its int4 operator only on machines with AMX, although the operator is right
without; its gate is opened here so that there is a choice of vLLM's own to replace on any x86-64
machine with AVX-512.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from autosel import device as devices
from autosel.integrations import vllm as plugin
from autosel.sources import CheckpointSource
from autosel.store import Store
from tests.layer.decided import candidate, store_times

_SHARDS = {
    "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w3": "w3", "w2": "w2",
}  # fmt: skip
_EXPERT = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.(\w+)$")


def open_gate() -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    cpu_moe.CPUExpertsInt4._supports_current_device = staticmethod(lambda: True)


def decide(folder: str, layer: int, dtype: str, db: str, backend: str, **part: int) -> None:
    """Decisions for this machine however many threads vLLM gives its worker."""
    problem = CheckpointSource(folder, layer, act_dtype=dtype, **part).problem
    machine = devices.detect("cpu")
    with Store.open(db) as store:
        for threads in range(1, (machine.threads or 1) + 1):
            there = replace(machine, threads=threads)
            times = {count: {candidate(backend, problem, there): 10.0} for count in (1, 64)}
            store_times(store, problem, there, times)


def make_layer(folder: str, number: int, config, dtype: torch.dtype, fault: str = ""):
    """vLLM's own layer, loaded tensor by tensor with its own loader and finished by it."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    problem = CheckpointSource(folder, number).problem
    runner = FusedMoEFactory(
        num_experts=problem.num_experts,
        top_k=problem.top_k,
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        params_dtype=dtype,
        quant_config=config.quant_config,
        prefix=f"model.layers.{number}.mlp.experts",
    )
    layer = runner.routed_experts
    shards = dict(_SHARDS)
    if fault == "swapped":
        shards |= {"gate_proj": "w3", "up_proj": "w1", "w1": "w3", "w3": "w1"}
    for file in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found = _EXPERT.search(name)
            if found is None or int(found[1]) != number or found[3] not in shards:
                continue
            shard, suffix = shards[found[3]], found[4]
            whole = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
            parameter = getattr(layer, whole, None)
            if parameter is not None:
                layer.weight_loader(parameter, tensor, whole, shard, int(found[2]))
    process_weights_after_loading(runner, config.model_config, torch.device("cpu"))
    return runner, layer


def layers(db: str, folders: list[str]) -> dict:
    """Each layer as vLLM runs it, as autosel does, and what a planted fault comes to."""
    import vllm
    from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    plugin.register()  # where autosel is not installed, only importable
    answer: dict = {"version": vllm.__version__}
    started = False
    for folder in folders:
        model = ModelConfig(folder, skip_tokenizer_init=True, max_model_len=64)
        dtype = str(model.dtype).removeprefix("torch.")
        truth = load_file(f"{folder}/expected/expected.safetensors")
        x = truth["layers.0.input"].to(model.dtype)
        ids, weights = truth["layers.0.topk_ids"], truth["layers.0.topk_weights"]
        found = answer[Path(folder).name] = {}
        for case in ("undecided", "decided", "swapped"):
            if case == "decided":
                decide(folder, 0, dtype, db, "torch_int4")
            config = VllmConfig(
                model_config=model, additional_config={"autosel": {"db": db, "model": folder}}
            )
            with set_current_vllm_config(config):
                if not started:
                    started = True
                    init_distributed_environment(1, 0, f"file://{db}.ranks", 0, "gloo")
                    initialize_model_parallel(1, 1)
                runner, layer = make_layer(folder, 0, config, model.dtype, case)
                try:
                    out = layer.forward_modular(x, weights, ids).float()
                except RuntimeError as error:  # vLLM's own operator: AWQ without zero points
                    found[case + " error"] = str(error)
                    out = torch.zeros_like(truth["layers.0.output"])
            expected = truth["layers.0.output"]
            found[case] = {
                "method": layer.quant_method.method_name,
                "status": plugin.in_use(runner)[layer.layer_name],
                "distance": float((out - expected).norm() / expected.norm()),
                "parameters": len(list(layer.parameters())),
            }
    return answer


def one_rank(db: str, folder: str, rank: int, split: str) -> dict:
    """One of two ranks of a layer: its part through autosel, the sum over both, and what one rank's
    fault comes to."""
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    plugin.register()
    model = ModelConfig(folder, skip_tokenizer_init=True, max_model_len=64)
    truth = load_file(f"{folder}/expected/expected.safetensors")
    decide(
        folder, 0, str(model.dtype).removeprefix("torch."), db, "torch_int4",
        **{f"{split}_rank": rank, f"{split}_size": 2},
    )  # fmt: skip
    config = VllmConfig(
        model_config=model,
        parallel_config=ParallelConfig(
            tensor_parallel_size=2, enable_expert_parallel=split == "ep"
        ),
        additional_config={"autosel": {"db": db}},
    )
    answer = {}
    with set_current_vllm_config(config):
        init_distributed_environment(2, rank, f"file://{db}.ranks", rank, "gloo")
        initialize_model_parallel(2, 1)
        runner, layer = make_layer(folder, 0, config, model.dtype)
        x = truth["layers.0.input"].to(model.dtype)
        out = layer.forward_modular(x, truth["layers.0.topk_weights"], truth["layers.0.topk_ids"])
        out = out.float()
        torch.distributed.all_reduce(out)
        expected = truth["layers.0.output"]
        answer["status"] = plugin.in_use(runner)[layer.layer_name]
        answer["distance"] = float((out - expected).norm() / expected.norm())
        config.compilation_config.static_forward_context.clear()  # one more of the same name
        config.compilation_config.static_all_moe_layers.clear()
        runner, layer = make_layer(folder, 0, config, model.dtype, "swapped" if rank else "")
        answer["faulty"] = plugin.in_use(runner)[layer.layer_name]
        torch.distributed.barrier()
    return answer


def generate(folder: str, db: str, eager: bool) -> dict:
    """Greedy tokens of a whole model through ``vllm.LLM``."""
    from vllm import LLM, SamplingParams

    if db:
        decide(folder, 0, "bfloat16", db, "cpu_native")
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        enforce_eager=eager,
        max_model_len=128,
        dtype="bfloat16",
        additional_config={"autosel": {"db": db}} if db else {},
    )
    prompts = [{"prompt_token_ids": [1, 5, 9, 13, 17]}, {"prompt_token_ids": [2, 4, 6, 8, 3]}]
    asked = SamplingParams(max_tokens=8, temperature=0, detokenize=False, logprobs=1)
    outputs = [out.outputs[0] for out in llm.generate(prompts, asked)]
    return {
        "tokens": [list(out.token_ids) for out in outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
            for out in outputs
        ],
    }


if __name__ in ("__main__", "__mp_main__"):  # vLLM's worker processes import the main module too
    open_gate()

if __name__ == "__main__":
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
    what, *rest = sys.argv[1:]
    if what == "layers":
        answer = layers(rest[0], rest[1:])
    elif what == "rank":
        answer = one_rank(rest[0], rest[1], int(rest[2]), rest[3])
    else:
        answer = generate(rest[0], rest[1], rest[2] == "eager")
    print("\nANSWER " + json.dumps(answer), flush=True)
