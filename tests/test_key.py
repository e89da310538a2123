"""What belongs to the key of a stored decision: every field, none silently passed over."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from autosel import device as device_module
from autosel import kernel_identity, native, registry
from autosel.backends import _humming_choices, _vllm_ops
from autosel.core import Activation, Device, Problem, QuantScheme
from autosel.explanation import explain
from autosel.identity import stale
from autosel.store import Store
from tests.test_store import COLD, DEVICE, PROBLEM, decided, measured

ROOT = Path(__file__).resolve().parents[1]
FULL = replace(DEVICE, flags=("sm90a",), threads=8, max_clock_mhz=1980, mig_slice="1g.18gb")

#: Another value for each field of a device; a new field must be added here.
OTHER_DEVICE = {
    "kind": "rocm", "name": "Test GPU NVL", "capability": (10, 0), "multiprocessors": 16,
    "memory_bytes": 1 << 34, "cache_bytes": 1 << 20, "shared_memory_bytes": 101376,
    "flags": ("gfx942",), "threads": 4, "driver": "581.0",
    "versions": (("torch", "2.13.0"), ("triton", "3.8.0")),
    "max_clock_mhz": 1755, "mig_slice": "2g.35gb",
}  # fmt: skip
SCHEME = PROBLEM.w13
OTHER_PROBLEM = {
    "num_experts": 16, "num_local_experts": 4, "top_k": 1, "hidden_size": 512,
    "intermediate_size": 256, "w13": replace(SCHEME, group_size=64),
    "w2": replace(SCHEME, num_bits=8), "activation": Activation("gelu"), "act_dtype": "float16",
    "has_bias": True, "router_weight_on_input": True,
}  # fmt: skip
OTHER_SCHEME = {
    "num_bits": 8, "group_size": -1, "symmetric": False, "has_g_idx": True,
    "scale_dtype": "float16",
}  # fmt: skip
#: Packages that a decision may depend on, as :func:`autosel.device.package_versions` names them.
PACKAGES = ("torch", "triton", "cuda", "hip", "vllm", "humming-kernels", "flashinfer-python",
            "zentorch", kernel_identity.KERNELS, kernel_identity.COMPILER)  # fmt: skip


@pytest.fixture
def store():
    with Store.open(":memory:") as opened:
        opened.add_measurement(measured(device=FULL))
        opened.add_decision(decided(1, None), FULL, COLD)
        yield opened


def test_every_field_of_a_device_and_of_a_layer_is_tested_here():
    assert set(OTHER_DEVICE) == {field.name for field in fields(Device)}
    assert set(OTHER_PROBLEM) == {field.name for field in fields(Problem)}
    assert set(OTHER_SCHEME) == {field.name for field in fields(QuantScheme)}
    assert all(OTHER_DEVICE[field.name] != getattr(FULL, field.name) for field in fields(Device))


def asked(store: Store, problem: Problem, device: Device):
    """What is used, and the fields that explain names as different."""
    assert store.decision(problem, device, 16, "uniform") is None
    assert store.measurements(problem, device) == []
    answer = explain(store, problem, device, 16)
    assert answer.status == "not tuned"
    assert answer.nearest is not None
    named = {difference.field for difference in answer.nearest.differences}
    for field in named:
        assert field in answer.why
    assert {d["field"] for d in answer.to_dict()["nearest"]["differences"]} == named
    return named


@pytest.mark.parametrize("field", OTHER_DEVICE)
def test_a_device_that_differs_in_one_field_is_not_answered_and_told_which(store, field):
    other = replace(FULL, **{field: OTHER_DEVICE[field]})
    expected = {"driver": "versions.driver", "versions": "versions.triton"}
    assert asked(store, PROBLEM, other) == {expected.get(field, f"device.{field}")}
    assert store.decision(PROBLEM, FULL, 16, "uniform") == decided(1, None)


@pytest.mark.parametrize("field", [f for f in OTHER_DEVICE if f not in ("kind", "name")])
def test_what_is_unknown_is_not_equal_to_what_is_known(store, field):
    nothing = () if field in ("flags", "versions") else None
    named = asked(store, PROBLEM, replace(FULL, **{field: nothing}))
    assert named
    assert all(field in name or name.startswith("versions.") for name in named)
    with Store.open(":memory:") as poor:  # and the other way round
        poor.add_decision(decided(1, None), replace(FULL, **{field: nothing}), COLD)
        assert poor.decision(PROBLEM, FULL, 16, "uniform") is None


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_counts_by_itself(store, package):
    with_it = replace(FULL, versions=tuple(sorted({**dict(FULL.versions), package: "1"}.items())))
    changed = replace(with_it, versions=tuple(
        (name, "2" if name == package else version) for name, version in with_it.versions
    ))  # fmt: skip
    store.add_decision(decided(1, None), with_it, COLD)
    assert store.decision(PROBLEM, with_it, 16, "uniform") is not None
    assert f"versions.{package}" in asked(store, PROBLEM, changed)
    gone = replace(with_it, versions=tuple(v for v in with_it.versions if v[0] != package))
    if package not in dict(FULL.versions):
        assert store.decision(PROBLEM, gone, 16, "uniform") is not None  # that of FULL itself
    found = list(stale(changed, store.entries()))
    assert any(d.field == f"versions.{package}" for item in found for d in item.differences)


@pytest.mark.parametrize("field", OTHER_PROBLEM)
def test_a_layer_that_differs_in_one_field_is_not_answered_and_told_which(store, field):
    change = {field: OTHER_PROBLEM[field]}
    if field == "router_weight_on_input":
        change["top_k"] = 1
    named = asked(store, replace(PROBLEM, **change), FULL)
    assert named
    assert all(name.split(".")[0] in change for name in named)


@pytest.mark.parametrize("gemm", ["w13", "w2"])
@pytest.mark.parametrize("field", OTHER_SCHEME)
def test_a_scheme_that_differs_in_one_field_is_told_with_its_full_name(store, gemm, field):
    scheme = replace(SCHEME, **{field: OTHER_SCHEME[field]})
    named = asked(store, replace(PROBLEM, **{gemm: scheme}), FULL)
    assert named == {f"{gemm}.{field}"}


def test_another_routing_and_another_way_of_timing_are_not_answered(store):
    assert store.decision(PROBLEM, FULL, 16, "zipf:1.2") is None
    hot = (("cache", "hot"), ("graph", True))
    assert store.decision(PROBLEM, FULL, 16, "uniform", timing=hot) is None
    assert store.decision(PROBLEM, FULL, 16, "uniform", timing=COLD) is not None
    answer = explain(store, PROBLEM, FULL, 16, routing="zipf:1.2")
    assert {d.field for d in answer.nearest.differences} == {"routing"}


# our own kernels ---------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the kernels that a test may change."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    shutil.copy(ROOT / "autosel" / "native.py", tmp_path / "native.py")
    monkeypatch.setattr(kernel_identity, "_PACKAGE", tmp_path)
    return tmp_path


def kernels(kind: str) -> str | None:
    return kernel_identity.versions(kind).get(kernel_identity.KERNELS)


GPU_FILES = sorted(p.name for p in (ROOT / "kernels").glob("*.py"))
CPU_FILES = sorted(f"csrc/{p.name}" for p in (ROOT / "kernels" / "csrc").iterdir())


@pytest.mark.parametrize("name", GPU_FILES + CPU_FILES)
def test_every_kernel_file_counts_for_the_devices_it_runs_on(checkout, name):
    before = {kind: kernels(kind) for kind in ("cpu", "cuda", "rocm", "xpu")}
    with (checkout / "kernels" / name).open("a") as file:
        file.write("\n# changed\n")
    after = {kind: kernels(kind) for kind in before}
    cpu = name.startswith("csrc")
    gpu = not cpu and not name.endswith("_space.py")  # where searches start measures nothing
    assert (after["cpu"] != before["cpu"]) == cpu
    for kind in ("cuda", "rocm", "xpu"):
        assert (after[kind] != before[kind]) == gpu


def test_a_change_of_equal_length_and_a_moved_byte_are_seen(checkout):
    file = checkout / "kernels" / "csrc" / CPU_FILES[0].split("/")[1]
    before, content = kernels("cpu"), file.read_bytes()
    file.write_bytes(content.replace(b"a", b"b", 1))
    assert kernels("cpu") != before
    file.write_bytes(content)
    assert kernels("cpu") == before
    (file.parent / "new.h").write_bytes(b"")
    assert kernels("cpu") != before


def test_files_that_have_not_changed_are_not_read_again(checkout, monkeypatch):
    first = kernels("cuda")
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"read {self}"))
    assert kernels("cuda") == first


def test_kernels_that_cannot_be_read_have_no_entry_and_so_match_nothing(checkout):
    shutil.rmtree(checkout / "kernels")
    (checkout / "native.py").unlink()
    assert kernels("cuda") is None
    assert kernels("cpu") is None


def test_the_place_of_the_files_does_not_count(checkout, tmp_path, monkeypatch):
    here = kernels("cuda")
    monkeypatch.setattr(kernel_identity, "_PACKAGE", ROOT / "autosel")  # through the link
    assert kernels("cuda") == here


def test_a_changed_kernel_makes_the_stored_decision_stale(checkout):
    before = device_module.detect("cpu")
    with Store.open(":memory:") as store:
        store.add_decision(decided(1, None), before, COLD)
        assert store.decision(PROBLEM, device_module.detect("cpu"), 4, "uniform") is not None
        with (checkout / "kernels" / CPU_FILES[0]).open("a") as file:
            file.write("\n")
        after = device_module.detect("cpu")
        assert store.decision(PROBLEM, after, 4, "uniform") is None
        (entry,) = store.stale(after)
        assert [d.field for d in entry.differences] == [f"versions.{kernel_identity.KERNELS}"]


@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler here")
def test_the_compiler_that_builds_the_cpu_kernel_counts(tmp_path, monkeypatch):
    first = kernel_identity.versions("cpu")[kernel_identity.COMPILER]
    said = subprocess.run([native.compiler(), "--version"], capture_output=True, text=True)
    assert first == said.stdout.splitlines()[0].strip()
    other = tmp_path / "other++"
    other.write_text("#!/bin/sh\necho other++ 99.1\n")
    other.chmod(0o755)
    monkeypatch.setenv("CXX", str(other))
    assert kernel_identity.versions("cpu")[kernel_identity.COMPILER] == "other++ 99.1"
    assert kernel_identity.COMPILER not in kernel_identity.versions("cuda")


def test_a_compiler_that_fails_or_hangs_is_none(tmp_path, monkeypatch):
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert kernel_identity.COMPILER not in kernel_identity.versions("cpu")


def test_nothing_is_hashed_at_import():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import autosel.kernel_identity as k;"
        "print(k._hash.cache_info().currsize)"
    )
    words = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb"),
        ("NVIDIA H200 MIG 2g.35gb+me", "2g.35gb+me"),
        ("NVIDIA H200", None),
        ("Some MIGHTY 2g card", None),
    ],
)
def test_the_slice_of_a_mig_instance(name, expected):
    assert device_module._mig_slice(name) == expected


# what runs without being installed ---------------------------------------------------------


def versions() -> dict[str, str]:
    return dict(device_module.package_versions("cuda"))


def none_installed(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


def test_libraries_that_a_variable_names_count_by_their_content(tmp_path, monkeypatch):
    """Another release's operators are another backend, though no version says so."""
    files = tmp_path / "one.so", tmp_path / "two.so"
    for file in files:
        file.write_bytes(b"operators")
    monkeypatch.delenv(_vllm_ops.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(metadata, "version", none_installed)
    assert "vllm" not in versions()
    monkeypatch.setenv(_vllm_ops.LIBRARY_VARIABLE, os.pathsep.join(map(str, files)))
    before = versions()["vllm"]
    assert before.startswith("sha256:")
    files[1].write_bytes(b"operatorz")
    os.utime(files[1], ns=(1, 1))
    assert versions()["vllm"] != before
    monkeypatch.setattr(metadata, "version", lambda name: "0.33.0")
    assert versions()["vllm"] == "0.33.0", "the installed one's number says it"
    monkeypatch.setattr(metadata, "version", none_installed)
    monkeypatch.setenv(_vllm_ops.LIBRARY_VARIABLE, str(tmp_path / "missing.so"))
    assert "vllm" not in versions()


def test_a_package_in_a_folder_counts_by_its_content(tmp_path, monkeypatch):
    found = []
    for text in ("a = 1", "a = 2", None):
        with monkeypatch.context() as patched:
            patched.setattr(metadata, "version", none_installed)
            patched.setattr(_humming_choices, "_sources", _humming_choices._sources.__wrapped__)
            spec = None
            if text is not None:
                (tmp_path / "forward.py").write_text(text)
                spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
            patched.setattr(importlib.util, "find_spec", lambda name, s=spec: s)
            found.append(_humming_choices.unpackaged().get("humming-kernels"))
    one, two, missing = found
    assert one.startswith("sha256:")
    assert one != two
    assert missing is None


def test_a_plugin_that_fails_to_say_is_left_out(monkeypatch):
    def broken(self):
        raise RuntimeError("no idea")

    monkeypatch.setattr(metadata, "version", none_installed)  # else it is not asked
    monkeypatch.setattr(type(registry.get("marlin")), "unpackaged", broken)
    assert "torch" in versions()
