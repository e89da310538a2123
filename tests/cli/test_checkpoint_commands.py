"""``inspect`` and ``dequantize`` on real checkpoints, and on ones that are damaged."""

import json
import shutil
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

PROJECTIONS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up",
    "w2": "down",
}  # fmt: skip


@pytest.fixture
def copy(get_checkpoint, tmp_path):
    """A private copy of a real checkpoint that a test may damage."""

    def make(name="ct-w4-g128-sym-mixtral"):
        folder = tmp_path / "copy"
        shutil.copytree(get_checkpoint(name).path, folder)
        return folder

    return make


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def test_inspect_accounts_for_every_expert_tensor(autosel, checkpoint):
    ran = autosel("inspect", checkpoint.path, "--json")
    assert ran.status == 0
    found = ran.json
    names = [item["name"] for item in found["tensors"]]
    assert len(names) == len(set(names))
    experts = {name for name in checkpoint.tensors if ".experts." in name}
    assert experts <= set(names)
    used = {item["name"] for item in found["tensors"] if item["used"]}
    assert used <= experts
    assert all(item["why"] for item in found["tensors"])
    assert [layer["index"] for layer in found["layers"]] == checkpoint.moe_layers
    assert all(layer["status"] == "quantized" for layer in found["layers"])
    text = autosel("inspect", checkpoint.path)
    assert text.status == 0
    assert f"{len(checkpoint.moe_layers)} MoE layer" in text.out
    listed = autosel("inspect", checkpoint.path, "--tensors")
    assert all(name in listed.out for name in experts)


def test_dequantize_is_bit_for_bit_what_the_packing_tool_gives(autosel, checkpoint, tmp_path):
    out = tmp_path / "out.safetensors"
    for layer in checkpoint.moe_layers:
        ran = autosel("dequantize", checkpoint.path, "--layer", layer, "-o", out)
        assert ran.status == 0, ran.err
        found = load_file(out)
        seen = set()
        for name, weight in found.items():
            module, _, last = name.rpartition(".")
            assert last == "weight"
            words = module.split(".")
            expert, projection = words[-2], PROJECTIONS[words[-1]]
            wanted = checkpoint.expected[f"layers.{layer}.experts.{expert}.{projection}"]
            assert weight.dtype == wanted.dtype
            assert torch.equal(weight, wanted), name
            # The name is the checkpoint's own: its packed tensors stand beside it.
            assert any(stored.startswith(f"{module}.") for stored in checkpoint.tensors), name
            seen.add((expert, projection))
        stem = f"layers.{layer}.experts."
        wanted = {tuple(n.split(".")[3:]) for n in checkpoint.expected if n.startswith(stem)}
        assert seen == wanted


def test_dequantize_says_what_it_wrote(autosel, get_checkpoint, tmp_path):
    out = tmp_path / "out.safetensors"
    path = get_checkpoint("ct-w4-g128-sym-mixtral").path
    ran = autosel("dequantize", path, "--layer", 0, "-o", out, "--json")
    with safe_open(out, "pt") as file:
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert {item["name"]: item["shape"] for item in ran.json["tensors"]} == shapes
    assert ran.json["bytes"] == out.stat().st_size


def test_dequantize_leaves_nothing_and_keeps_the_old_file_when_it_fails(autosel, copy, tmp_path):
    folder = copy()
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    # The last expert's down projection is damaged, so most tensors are written before it is met.
    broken = next(n for n in sorted(tensors, reverse=True) if n.endswith("w2.weight_scale"))
    tensors[broken] = torch.full_like(tensors[broken], float("nan"))
    save_file(tensors, name)
    place = tmp_path / "place"
    place.mkdir()
    out = place / "out.safetensors"
    out.write_bytes(b"before")
    ran = autosel("dequantize", folder, "--layer", 0, "-o", out)
    assert ran.status == 1
    assert broken in ran.error
    assert out.read_bytes() == b"before"
    assert [p.name for p in place.iterdir()] == ["out.safetensors"]


def test_dequantize_writes_no_infinities(autosel, copy, tmp_path):
    """60,000 is a float16, 60,000 times 7 is none."""
    folder = copy()
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    large = next(n for n in sorted(tensors) if n.endswith("w2.weight_scale"))
    tensors[large] = torch.full_like(tensors[large].half(), 60_000.0)
    for other in tensors:
        if other.endswith("weight_scale"):
            tensors[other] = tensors[other].half()
    save_file(tensors, name)
    ran = autosel("dequantize", folder, "--layer", 0, "-o", tmp_path / "out.safetensors")
    assert ran.status == 1
    module = large.removesuffix("_scale")
    assert f"{module}: dequantised values: found" in ran.error
    assert "beyond float16" in ran.error
    assert not (tmp_path / "out.safetensors").exists()


@pytest.mark.parametrize(
    ("layer", "output", "words"),
    [
        (7, "x.safetensors", "MoE layer: found 7, expected one of 0"),
        (0, "none/x.safetensors", "folder"),
        (0, ".", "directory"),
    ],
)
def test_dequantize_refuses(autosel, get_checkpoint, tmp_path, layer, output, words):
    path = get_checkpoint("ct-w4-g128-sym-mixtral").path
    ran = autosel("dequantize", path, "--layer", layer, "-o", tmp_path / output)
    assert ran.status in (1, 2)
    assert words in ran.error
    assert not (tmp_path / "x.safetensors").exists()


def test_dequantize_never_overwrites_the_checkpoint(autosel, copy):
    folder = copy()
    (name,) = folder.glob("*.safetensors")
    before = name.read_bytes()
    for output in (name, folder / "config.json"):
        ran = autosel("dequantize", folder, "--layer", 0, "-o", output)
        assert ran.status == 1
        assert "checkpoint itself" in ran.error
    assert name.read_bytes() == before


COMMANDS = {
    "inspect": lambda folder, out: ["inspect", folder],
    "dequantize": lambda folder, out: ["dequantize", folder, "--layer", 0, "-o", out],
    "backends": lambda folder, out: ["backends", folder],
    "explain": lambda folder, out: ["explain", folder, "--tokens", 4],
    "plot": lambda folder, out: ["plot", folder, "-o", out.with_suffix(".png")],
    "sweep": lambda folder, out: ["sweep", folder, "--tokens", 1],
}


def truncate_weights(folder):
    (name,) = folder.glob("*.safetensors")
    name.write_bytes(name.read_bytes()[:-1000])
    return name.name


def damage_header(folder):
    (name,) = folder.glob("*.safetensors")
    name.write_bytes(b"\xff" * 8 + name.read_bytes()[8:])
    return name.name


def only_pickle(folder):
    (name,) = folder.glob("*.safetensors")
    name.unlink()
    marker = folder / "marker"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    (folder / "pytorch_model.bin").write_bytes(payload)
    return "safetensors"


def no_config(folder):
    (folder / "config.json").unlink()
    return "config.json"


def cut_config(folder):
    path = folder / "config.json"
    path.write_text(path.read_text()[:200])
    return "config.json"


def nan_group(folder):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"group_size": 128', '"group_size": NaN'))
    return "group_size"


def unknown_method(folder):
    edit_config(folder, lambda c: c["quantization_config"].update(quant_method="hqq"))
    return "hqq"


def climbing_index(folder):
    (name,) = folder.glob("*.safetensors")
    names = load_file(name)
    name.rename(folder.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return ".."


def missing_shard(folder):
    (name,) = folder.glob("*.safetensors")
    names = list(load_file(name))
    index = {"weight_map": dict.fromkeys(names, name.name) | {names[0]: "gone.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "gone.safetensors"


def deep_config(folder):
    (folder / "config.json").write_text("[" * 100_000)
    return "config.json"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "damage",
    [truncate_weights, damage_header, only_pickle, no_config, cut_config, nan_group,
     unknown_method, climbing_index, missing_shard, deep_config],
)  # fmt: skip
def test_bad_input_is_one_clear_line_in_every_command(autosel, copy, tmp_path, command, damage):
    folder = copy()
    wanted = damage(folder)
    out = tmp_path / "out.safetensors"
    ran = autosel(*COMMANDS[command](folder, out))
    assert ran.status == 1, ran.out
    assert wanted in ran.error
    assert "unexpected" not in ran.error
    assert not (folder / "marker").exists()
    assert not out.exists()
    assert not out.with_suffix(".png").exists()
    assert ran.out == ""


def test_names_from_a_hostile_file_cannot_write_to_the_terminal(autosel, copy):
    folder = copy()
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    tensors["model.layers.0.block_sparse_moe.experts.0.w1.\x1b[2J[red]"] = torch.zeros(1)
    save_file(tensors, name)
    edit_config(folder, lambda c: c.update(model_type="mix\x1b]0;title\x07tral"))
    for args in (["inspect", folder], ["inspect", folder, "--tensors"]):
        ran = autosel(*args)
        assert "\x1b" not in ran.out + ran.err
        assert "\x07" not in ran.out + ran.err


def test_a_quantised_router_is_noted_and_ignored(autosel, copy):
    folder = copy()
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    router = next(n for n in tensors if n.endswith("block_sparse_moe.gate.weight"))
    weight = tensors.pop(router)
    stem = router.removesuffix(".weight")
    experts, inputs = weight.shape
    tensors[f"{stem}.weight_packed"] = torch.zeros(experts, inputs // 8, dtype=torch.int32)
    tensors[f"{stem}.weight_scale"] = torch.ones(experts, inputs // 128, dtype=torch.bfloat16)
    tensors[f"{stem}.weight_shape"] = torch.tensor([experts, inputs])
    save_file(tensors, name)
    ran = autosel("inspect", folder)
    assert ran.status == 0, ran.err
    assert "router is quantised" in ran.out
    assert "0       quantized" in ran.out


def test_sixty_sharded_layers_are_listed_without_reading_weights(autosel, tmp_path):
    """Only headers exist: reading any weight would read past the end of what was written."""
    folder = tmp_path / "big"
    folder.mkdir()
    layers, experts, shards = 60, 64, 15
    sizes = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        header, offset = {}, 0

        def add(name, dtype, width, *shape, file=file, header=header):
            nonlocal offset
            size = width * int(torch.tensor(shape).prod())
            header[name] = {
                "dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size],
            }  # fmt: skip
            offset += size
            weight_map[name] = file

        for layer in range(shard * layers // shards, (shard + 1) * layers // shards):
            for expert in range(experts):
                for projection, (n, k) in sizes.items():
                    module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                    add(f"{module}.weight_packed", "I32", 4, n, k // 8)
                    add(f"{module}.weight_scale", "BF16", 2, n, k // 128)
            add(f"model.layers.{layer}.mlp.gate.weight", "BF16", 2, experts, 2048)
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
               "group_size": 128}  # fmt: skip
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768,
        "num_experts": experts, "num_experts_per_tok": 8, "num_hidden_layers": layers,
        "hidden_act": "silu", "torch_dtype": "bfloat16", "norm_topk_prob": True,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["re:.*mlp.gate$"],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    start = time.process_time()
    ran = autosel("inspect", folder)
    seconds = time.process_time() - start
    assert ran.status == 0, ran.err
    assert "0-59" in ran.out
    assert str(layers * experts * 6) in ran.out
    assert seconds < 5, seconds


def test_a_damaged_layer_is_refused_by_name_and_the_others_go_on(autosel, copy):
    folder = copy("ct-w4-g32-sym-actgroup-qwen3moe")
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    stem = "model.layers.1.mlp.experts.2.down_proj"
    for tensor in [n for n in tensors if n.startswith(f"{stem}.")]:
        del tensors[tensor]
    tensors[f"{stem}.weight"] = torch.zeros(64, 96, dtype=torch.bfloat16)
    save_file(tensors, name)
    ran = autosel("inspect", folder)
    assert ran.status == 0
    (row,) = [line for line in ran.out.splitlines() if line.startswith("1 ")]
    assert "refused" in row
    assert f"{stem}.weight" in row
    assert "\n0 " in ran.out
    ran = autosel("explain", folder, "--tokens", 3)
    assert ran.status == 0
    assert "layer 0:" in ran.out
    assert "warning: layer 1 is left out: refused" in ran.err
    for args in (["explain", folder, "--tokens", 3, "--layer", 1], ["sweep", folder, "--layer", 1]):
        ran = autosel(*args)
        assert ran.status == 1
        assert f"{stem}.weight" in ran.error


def test_layers_left_out_for_one_reason_are_one_warning(autosel, copy):
    folder = copy("ct-w4-g32-sym-actgroup-qwen3moe")
    edit_config(
        folder,
        lambda c: c["quantization_config"]["ignore"].append("re:.*layers[.]1[.]mlp.*"),
    )
    (name,) = folder.glob("*.safetensors")
    tensors = load_file(name)
    for tensor in [n for n in tensors if ".layers.1.mlp.experts" in n]:
        packed = tensors.pop(tensor)
        if tensor.endswith("weight_packed"):
            out, words = packed.shape
            plain = torch.zeros(out, words * 8, dtype=torch.bfloat16)
            tensors[tensor.replace("weight_packed", "weight")] = plain
    save_file(tensors, name)
    ran = autosel("backends", folder)
    assert ran.status == 0, ran.err
    assert ran.err.count("warning: ") == 1
    assert "layer 1 is left out: unquantized" in ran.err
