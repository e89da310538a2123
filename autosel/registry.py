"""Finds the backends: the files of :mod:`autosel.backends`, entry points, and ``register``.

Listing names imports nothing; a backend's module is imported when it is first asked for. One that
cannot be imported stays in the list as an unavailable row with the reason.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

from autosel.core import Device, Params, Problem, Reason, Support
from autosel.errors import AutoselError, UnsupportedError, field_error
from autosel.handlers import let_through
from autosel.interfaces import Backend, Layout

PACKAGE = "autosel.backends"
ENTRY_POINT_GROUP = "autosel.backends"


class UnavailableBackend(Backend):
    """Stands in for a backend whose code could not be loaded; supports nothing, says why."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason

    def available(self, device: Device) -> Support:
        return Support.no(self.reason)

    def supports(self, problem: Problem, device: Device) -> Support:
        return Support.no(self.reason)

    def layout(self, problem: Problem, params: Params) -> Layout:
        self._refuse()

    def run(self, *args: object, **kwargs: object) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(f"backend {self.name}: {self.reason}")


class Registration:
    """What :func:`register` returns: leave it alone, or use it in a ``with`` statement."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def __enter__(self) -> Backend:
        return self.backend

    def __exit__(self, *exc: object) -> None:
        if _registered.get(self.backend.name) is self.backend:
            unregister(self.backend.name)


_lock = threading.RLock()
_loaded: dict[str, Backend] = {}
_registered: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """Every backend's name: built-in files, then entry points, then registered ones."""
    builtin = _builtin_names()
    return (*builtin, *_entry_points(builtin), *_registered)


def get(name: str) -> Backend:
    """The backend called ``name``; case and ``-`` against ``_`` do not matter.

    Raises AutoselError, listing the names, when there is none. A backend that fails to load is
    returned as an :class:`UnavailableBackend`.
    """
    key = normalize(name)
    with _lock:
        if key in _registered:
            return _registered[key]
        if key not in _loaded:
            builtin = _builtin_names()
            plugins = _entry_points(builtin)
            if key in builtin:
                _loaded[key] = _load_file(key)
            elif key in plugins:
                _loaded[key] = _load_entry_point(key, plugins[key])
            else:
                _unknown(name)
        return _loaded[key]


def all_backends() -> tuple[Backend, ...]:
    """Every backend, loaded, in the order of :func:`names`."""
    return tuple(get(name) for name in names())


def registered() -> tuple[Backend, ...]:
    """The backends added by :func:`register`: only this process knows them."""
    with _lock:
        return tuple(_registered.values())


def register(backend: Backend | type[Backend]) -> Registration:
    """Add a backend for this process; ``with register(backend):`` removes it again.

    Raises AutoselError when the object is no backend or its name is taken. A sweep sends it to its
    worker process (:mod:`autosel.worker_wire`); other processes that are not forked do not see it:
    a package does that through the entry point group ``autosel.backends``.
    """
    instance = _instance(backend, "register")
    with _lock:
        if instance.name in names():
            raise AutoselError(
                field_error("register", "backend name", repr(instance.name), "a name not in use")
            )
        _registered[instance.name] = instance
    return Registration(instance)


def unregister(name: str) -> None:
    """Remove a backend added by :func:`register`."""
    with _lock:
        if _registered.pop(normalize(name), None) is None:
            raise AutoselError(
                field_error(
                    "unregister",
                    "backend name",
                    repr(name),
                    "one of the registered " + (", ".join(_registered) or "(none)"),
                )
            )


def normalize(name: str) -> str:
    """``FLASHINFER_TRTLLM`` and ``flashinfer-trtllm`` both mean ``flashinfer_trtllm``."""
    return name.strip().lower().replace("-", "_")


def _builtin_names() -> tuple[str, ...]:
    return _modules(tuple(importlib.import_module(PACKAGE).__path__))


@functools.lru_cache(maxsize=8)
def _modules(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Modules in a package's folders, listed once: grading a pack asks for every backend, and
    listing them anew took a quarter of a model's look-ups."""
    found = (info.name for info in pkgutil.iter_modules(folders))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def _entry_points(builtin: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Entry points by normalised name; a name that is already taken is left out with a warning."""
    found: dict[str, EntryPoint] = {}
    for point in sorted(
        _installed(entry_points, tuple(sys.path)), key=lambda p: (normalize(p.name), p.value)
    ):
        key = normalize(point.name)
        if key in builtin or (key in found and found[key].value != point.value):
            taken = "a built-in backend" if key in builtin else found[key].value
            warnings.warn(
                f"backend entry point {point.name} = {point.value} is left out: "
                f"the name belongs to {taken}",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            found.setdefault(key, point)
    return found


@functools.lru_cache(maxsize=8)
def _installed(
    read: Callable[..., Iterable[EntryPoint]], search_path: tuple[str, ...]
) -> tuple[EntryPoint, ...]:
    """The group's entry points, read once for a search path: a look at every installed package
    takes 7 ms, and grading a pack asks for all backends."""
    return tuple(read(group=ENTRY_POINT_GROUP))


def _load_file(name: str) -> Backend:
    try:
        module = importlib.import_module(f"{PACKAGE}.{name}")
        classes = [
            value
            for value in vars(module).values()
            if inspect.isclass(value)
            and issubclass(value, Backend)
            and not inspect.isabstract(value)
            and value.__module__ == module.__name__
            and getattr(value, "name", None) == name
        ]
        if len(classes) != 1:
            raise AutoselError(
                field_error(
                    f"{name}.py",
                    f"Backend subclasses named {name!r}",
                    len(classes),
                    "exactly one",
                )
            )
        return _instance(classes[0], f"{name}.py")
    except (Exception, SystemExit) as error:
        return _unavailable(name, f"{PACKAGE}.{name}", error)


def _load_entry_point(name: str, point: EntryPoint) -> Backend:
    try:
        backend = _instance(point.load(), f"entry point {point.name}")
        if backend.name != name:
            raise AutoselError(
                field_error(f"entry point {point.name}", "name", repr(backend.name), repr(name))
            )
        return backend
    except (Exception, SystemExit) as error:
        return _unavailable(name, point.value, error)


def _instance(candidate: object, where: str) -> Backend:
    made = candidate() if inspect.isclass(candidate) else candidate
    if not isinstance(made, Backend):
        raise AutoselError(
            field_error(where, "object", type(made).__name__, "a Backend subclass or instance")
        )
    name = getattr(made, "name", None)
    if not isinstance(name, str) or not name.isidentifier() or normalize(name) != name:
        raise AutoselError(
            field_error(where, "backend name", repr(name), "a lower-case Python identifier")
        )
    return made


def _unavailable(name: str, source: str, error: BaseException) -> Backend:
    """An unavailable row of its own class, since a name belongs to a backend's class."""
    let_through(error)
    detail = " ".join(str(error).split()) or "no message"
    reason = Reason(f"import of {source}", f"{type(error).__name__}: {detail}", "no error")
    members = {"name": name, "summary": "Could not be loaded."}
    cls: type[UnavailableBackend] = type("Unavailable", (UnavailableBackend,), members)
    return cls(reason)


def _unknown(name: str) -> NoReturn:
    known = names()
    close = difflib.get_close_matches(normalize(name), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise AutoselError(
        field_error("backend", "name", repr(name), "one of " + ", ".join(known)) + hint
    )
