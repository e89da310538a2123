"""The machine's description: right on this machine, and unharmed by odd or absent facts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autosel import cpuinfo, device
from autosel.core import Device
from autosel.errors import AutoselError


def test_this_cpu_matches_what_the_system_says() -> None:
    found = device.detect("cpu")
    assert found.kind == "cpu"
    assert found.torch_device == "cpu"
    assert found.threads == torch.get_num_threads()
    assert found.version("torch") == torch.__version__
    assert found.name
    assert "  " not in found.name
    capability = torch.backends.cpu.get_cpu_capability()  # torch's own probe, not ours
    if capability in ("AVX2", "AVX512"):
        assert "avx2" in found.flags
        assert ("avx512f" in found.flags) == (capability == "AVX512")
    assert found.cache_bytes is None or found.cache_bytes > 100_000
    if hasattr(os, "sysconf"):
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        assert found.memory_bytes is not None
        assert 0 < found.memory_bytes < physical + (1 << 28)


def test_a_device_survives_text_and_its_fingerprint_sees_every_field() -> None:
    found = device.detect("cpu")
    assert Device.from_dict(found.to_dict()) == found
    assert eval(repr(found), {"Device": Device}) == found
    changed = [
        replace(found, name="another"),
        replace(found, flags=(*found.flags, "amx_tile")),
        replace(found, threads=(found.threads or 0) + 1),
        replace(found, driver="550.1"),
        replace(found, cache_bytes=1),
        replace(found, capability=(9, 0)),
        replace(found, versions=(("torch", "0.0"),)),
    ]
    marks = {device.fingerprint(d) for d in [found, *changed]}
    assert len(marks) == len(changed) + 1
    assert device.fingerprint(Device.from_dict(found.to_dict())) == device.fingerprint(found)


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu"])
def test_an_absent_accelerator_is_one_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    with pytest.raises(AutoselError) as error:
        device.detect(kind)
    text = str(error.value)
    assert "\n" not in text
    assert kind in text
    assert "expected at least 1" in text
    assert device.detect().kind == "cpu"


def test_hidden_devices_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(AutoselError, match="CUDA_VISIBLE_DEVICES=''"):
        device.detect("cuda")


def test_a_driver_that_raises_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert device.detect().kind == "cpu"


def test_unknown_kind_and_index_are_refused() -> None:
    with pytest.raises(AutoselError, match="one of cpu, cuda"):
        device.detect("tpu")
    with pytest.raises(AutoselError, match="found 3, expected 0 to 0"):
        device.detect("cpu", 3)


def test_pretend_replaces_and_gives_back() -> None:
    hopper = Device(kind="cuda", name="NVIDIA H200", capability=(9, 0))
    with device.pretend(hopper):
        assert device.detect() == hopper
        assert device.detect("cuda") == hopper
        with pytest.raises(AutoselError, match="found cuda, expected cpu"):
            device.detect("cpu")
        with device.pretend(replace(hopper, name="")):
            assert device.detect().name == ""
        assert device.detect() == hopper
    assert device.detect("cpu").kind == "cpu"


def _cache(root: Path, cpu: int, index: int, level: int, size: str, shared: str, kind: str) -> None:
    folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (
        ("level", str(level)),
        ("size", size),
        ("shared_cpu_list", shared),
        ("type", kind),
    ):
        (folder / name).write_text(text + "\n")


def test_last_level_caches_of_several_dies_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four CPUs on two dies, 32 MiB each; counted once a die, inner caches not at all."""
    monkeypatch.setattr(cpuinfo, "usable_cpus", lambda: {0, 1, 2, 3})
    for cpu in range(4):
        die = "0-1" if cpu < 2 else "2-3"
        _cache(tmp_path, cpu, 0, 1, "32K", str(cpu), "Instruction")
        _cache(tmp_path, cpu, 1, 2, "1024K", str(cpu), "Unified")
        _cache(tmp_path, cpu, 2, 3, "32768K", die, "Unified")
    assert cpuinfo.last_level_cache(str(tmp_path)) == 2 * (32 << 20)
    monkeypatch.setattr(cpuinfo, "usable_cpus", lambda: {0, 1})
    assert cpuinfo.last_level_cache(str(tmp_path)) == 32 << 20


def test_no_or_odd_cache_files_mean_torchs_word_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)
    assert cpuinfo.last_level_cache(str(tmp_path)) is None
    monkeypatch.setattr(cpuinfo, "usable_cpus", lambda: {0})
    _cache(tmp_path, 0, 0, 3, "much", "0", "Unified")
    assert cpuinfo.last_level_cache(str(tmp_path)) is None
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"l2_cache_size": 7})
    assert cpuinfo.last_level_cache(str(tmp_path)) == 7


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"model name": "Intel(R) Xeon(R)   Gold 6430"}, "Intel(R) Xeon(R) Gold 6430"),
        ({"cpu implementer": "0x41", "cpu part": "0xd40"}, "CPU implementer 0x41 part 0xd40"),
        ({"cpu": "POWER9, altivec supported"}, "POWER9, altivec supported"),
    ],
)
def test_processor_names(facts: dict[str, str], name: str) -> None:
    assert cpuinfo.cpu_name(facts) == name


def test_only_instruction_sets_are_kept_so_that_a_kernel_update_is_no_new_machine() -> None:
    words = "fpu smep ibpb retpoline AVX2 avx512_bf16 amx_tile sme asimd sve2 i8mm bf16 smap arat"
    assert cpuinfo.isa(words) == (
        "amx_tile",
        "asimd",
        "avx2",
        "avx512_bf16",
        "bf16",
        "i8mm",
        "sme",
        "sve2",
    )


def test_flags_from_torch_carry_linuxs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"avx512_f": True, "avx512_bf16": True, "amx_tile": False, "cpu_name": "x", "fma3": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: said, raising=False)
    assert cpuinfo.torch_capabilities() == ("avx512_bf16", "avx512f", "fma")


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/sys/fs/cgroup/memory.max": str(2 << 30),
        "/sys/fs/cgroup/memory.current": str(1 << 30),
        "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 88888888 kB\n",
    }
    monkeypatch.setattr(cpuinfo, "read_text", lambda path: texts.get(str(path), ""))
    assert cpuinfo.total_memory() == 2 << 30
    assert cpuinfo.available_memory() == 1 << 30
    texts["/sys/fs/cgroup/memory.max"] = "max"
    assert cpuinfo.available_memory() == 88888888 * 1024


class _Properties:
    name = "NVIDIA  H200"
    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = 150_000_000_000
    L2_cache_size = 60 << 20
    shared_memory_per_block_optin = 232448
    gcnArchName = "gfx942:sramecc+"  # noqa: N815


def test_cuda_properties_map_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own property names; the real ones need a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: _Properties())
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    monkeypatch.setattr(
        cpuinfo, "read_text", lambda path: version if "nvidia/version" in str(path) else ""
    )
    found = device.detect()
    assert (found.kind, found.name, found.capability) == ("cuda", "NVIDIA H200", (9, 0))
    assert (found.multiprocessors, found.cache_bytes) == (132, 60 << 20)
    assert (found.shared_memory_bytes, found.driver) == (232448, "570.86.15")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    rocm = device.detect()
    assert (rocm.kind, rocm.capability, rocm.flags) == ("rocm", None, ("gfx942",))
    assert rocm.torch_device == "cuda"
    assert rocm.version("hip") == "6.4"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_gpu() -> None:
    found = device.detect("cuda")
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.cache_bytes
    assert found.shared_memory_bytes
    free = device.free_memory_bytes(found)
    assert free is not None
    assert 0 < free <= (found.memory_bytes or 0)


def test_importing_asks_nothing_and_stays_light() -> None:
    """In a fresh interpreter: no device query, none of the heavy packages."""
    code = (
        "import sys, autosel, autosel.device\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'triton', 'optuna', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
