"""The registry finds backends by file name, entry point and registration, and never crashes."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import autosel.backends
from autosel import registry
from autosel.core import Device, Problem, QuantScheme, Support
from autosel.errors import AutoselError, UnsupportedError
from autosel.interfaces import Backend

CPU = Device(kind="cpu", name="any")
SCHEME = QuantScheme(4, 32, True)
PROBLEM = Problem(4, 4, 2, 64, 32, SCHEME, SCHEME)


class Fake(Backend):
    name = "fake_for_registry"
    summary = "Made for a test."

    def supports(self, problem, device):
        return Support.yes()

    def layout(self, problem, params):
        raise NotImplementedError

    def run(self, packed, x, routing, params, out):
        raise NotImplementedError


@pytest.fixture
def backend_folder(tmp_path, monkeypatch):
    """An extra folder on the path of autosel.backends, forgotten again afterwards."""
    monkeypatch.setattr(autosel.backends, "__path__", [*autosel.backends.__path__, str(tmp_path)])
    before = set(registry._loaded)
    modules = set(sys.modules)
    yield tmp_path
    for name in set(registry._loaded) - before:
        del registry._loaded[name]
    for name in set(sys.modules) - modules:
        if name.startswith("autosel.backends."):
            del sys.modules[name]


def plugin(monkeypatch, *points):
    made = [importlib.metadata.EntryPoint(n, v, registry.ENTRY_POINT_GROUP) for n, v in points]
    monkeypatch.setattr(registry, "entry_points", lambda group: made)


def test_every_file_is_a_row_under_its_own_name():
    folder = Path(autosel.backends.__file__).parent
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert files <= set(registry.names())
    assert "emulation" in files
    for name in files:
        assert registry.get(name).name == name


def test_listing_imports_no_backend():
    code = (
        "import sys\n"
        "from autosel import registry\n"
        "assert 'emulation' in registry.names()\n"
        "print([m for m in sys.modules if m.startswith('autosel.backends.')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("spelling", ["EMULATION", "Emulation", " emulation "])
def test_names_ignore_case(spelling):
    assert registry.get(spelling).name == "emulation"


def test_dash_means_underscore():
    with registry.register(Fake):
        assert registry.get("FAKE-for-registry").name == Fake.name


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(AutoselError) as caught:
        registry.get("emulatoin")
    message = str(caught.value)
    assert "'emulatoin'" in message
    assert "did you mean emulation?" in message
    assert "torch_int4" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import no_such_package_anywhere\n", "ModuleNotFoundError: No module named"),
        ("raise RuntimeError('line one\\nline two')\n", "RuntimeError: line one line two"),
        ("def broken(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("x = 1\n", "Backend subclasses named 'broken_file': found 0"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_an_unavailable_row(backend_folder, source, expected):
    (backend_folder / "broken_file.py").write_text(source)
    assert "broken_file" in registry.names()
    backend = registry.get("broken_file")
    assert backend.name == "broken_file"
    for support in (backend.available(CPU), backend.supports(PROBLEM, CPU)):
        assert not support
        assert expected in str(support)
        assert "\n" not in str(support)
    with pytest.raises(UnsupportedError):
        backend.layout(PROBLEM, {})
    with pytest.raises(UnsupportedError):
        backend.run(None, None, None, {}, None)
    assert backend in registry.all_backends()


def test_files_with_an_underscore_are_helpers(backend_folder):
    (backend_folder / "_helper.py").write_text("raise RuntimeError\n")
    assert "_helper" not in registry.names()


def test_register_and_unregister():
    registration = registry.register(Fake())
    try:
        assert registry.names()[-1] == Fake.name
        assert registry.get(Fake.name) is registration.backend
        with pytest.raises(AutoselError, match="a name not in use"):
            registry.register(Fake)
    finally:
        registry.unregister(Fake.name)
    assert Fake.name not in registry.names()
    with pytest.raises(AutoselError):
        registry.get(Fake.name)
    with pytest.raises(AutoselError, match="one of the registered"):
        registry.unregister(Fake.name)


def test_register_as_context_also_cleans_up_after_an_error():
    with pytest.raises(KeyError), registry.register(Fake):
        raise KeyError
    assert Fake.name not in registry.names()


@pytest.mark.parametrize("name", ["emulation", "Upper", "with-dash", "", None])
def test_register_refuses_bad_names(name):
    bad = type("Bad", (Fake,), {"name": name})
    with pytest.raises(AutoselError, match="backend name"):
        registry.register(bad)


@pytest.mark.parametrize("thing", [object(), 3, dict])
def test_register_refuses_other_objects(thing):
    with pytest.raises(AutoselError, match="a Backend subclass or instance"):
        registry.register(thing)


def test_entry_points_are_found_and_loaded_on_demand(monkeypatch, backend_folder):
    plugin(monkeypatch, ("fake_for_registry", f"{__name__}:Fake"))
    assert Fake.name in registry.names()
    assert type(registry.get(Fake.name)).__name__ == "Fake"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("missing_module", "no_such_package_anywhere:X", "ModuleNotFoundError"),
        ("missing_attribute", f"{__name__}:Nothing", "AttributeError"),
        ("wrong_object", f"{__name__}:SCHEME", "a Backend subclass or instance"),
        ("other_name", f"{__name__}:Fake", "name: found 'fake_for_registry'"),
    ],
)
def test_a_bad_entry_point_is_an_unavailable_row(
    monkeypatch, backend_folder, name, value, expected
):
    plugin(monkeypatch, (name, value))
    backend = registry.get(name)
    assert backend.name == name
    assert expected in str(backend.available(CPU))


def test_an_entry_point_cannot_take_a_built_in_name(monkeypatch):
    plugin(monkeypatch, ("Emulation", f"{__name__}:Fake"))
    with pytest.warns(RuntimeWarning, match="the name belongs to a built-in backend"):
        assert registry.names().count("emulation") == 1
    assert registry.get("emulation").summary != Fake.summary


def test_two_entry_points_of_one_name_keep_one(monkeypatch, backend_folder):
    plugin(monkeypatch, ("fake_for_registry", f"{__name__}:Fake"), ("fake_for_registry", "z:Z"))
    with pytest.warns(RuntimeWarning, match="z:Z is left out"):
        assert registry.names().count(Fake.name) == 1


def test_installed_packages_are_read_once_for_a_search_path(monkeypatch):
    """Grading a pack asks for all backends; sixty layers of a model would take half a second."""
    reads = []

    def read(group):
        reads.append(group)
        return ()

    monkeypatch.setattr(registry, "entry_points", read)
    for _ in range(3):
        registry.names()
    assert len(reads) == 1
    monkeypatch.syspath_prepend("/no/such/folder")
    registry.names()
    assert len(reads) == 2
