"""The wheel holds one top-level name, our kernels included, and imports stay light."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: A file below results/ that only the built copy has.
PROBE = "a-device/packs/probe.json"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of what git would hand out, so that the checkout stays clean."""
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    wanted = ("autosel", "kernels", "results", "pyproject.toml", "README.md", "LICENSE")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *wanted]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    files = listed.stdout.split("\0")
    for name in filter(None, files):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    (source / "results" / PROBE).parent.mkdir(parents=True)
    (source / "results" / PROBE).write_text("{}")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(out), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


def test_only_top_level_name_is_autosel(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"autosel"}


def test_wheel_carries_kernels_and_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    kernels = {f"autosel/kernels/{path.name}" for path in (ROOT / "kernels").glob("*.py")}
    assert kernels, "no kernel files in the checkout"
    assert kernels <= names
    assert "autosel/py.typed" in names
    assert "autosel/data/models.csv" in names


def test_wheel_carries_the_packs_that_ship(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packs = {
        f"autosel/builtin/{path.relative_to(ROOT / 'results').as_posix()}"
        for path in (ROOT / "results").glob("*/packs/*.json")
    }
    carried = {name for name in names if name.startswith("autosel/builtin/")}
    assert carried - {f"autosel/builtin/{PROBE}"} == packs
    assert f"autosel/builtin/{PROBE}" in names, "a pack in results/ must reach the wheel"
    assert "autosel/packs/pack.schema.json" in names


def test_builtin_is_a_relative_link():
    link = ROOT / "autosel" / "builtin"
    assert link.is_symlink()
    assert str(link.readlink()) == "../results"


def test_kernels_is_a_relative_link():
    link = ROOT / "autosel" / "kernels"
    assert link.is_symlink()
    assert str(link.readlink()) == "../kernels"
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_import_is_light():
    code = (
        "import sys, autosel; "
        "heavy = {'triton', 'optuna', 'pandas', 'matplotlib'} & set(sys.modules); "
        "import torch; "
        "assert not torch.cuda.is_initialized(); "
        "print(sorted(heavy)); sys.exit(bool(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
