"""The machine, as far as timings depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autosel.core.problem import to_plain


@dataclass(frozen=True, slots=True)
class Device:
    """What the timings depend on: the machine, its driver and the installed packages.

    ``capability`` is CUDA's ``(major, minor)`` and None where the device has no such number.
    ``flags`` are instruction-set names (``avx2``, ``avx512_bf16``, ``amx_tile``, ``gfx1100``).
    ``versions`` are ``(package, version)`` pairs, sorted; ``threads`` is torch's thread count.
    ``max_clock_mhz`` is the highest clock that the device is built for (not the present one) and
    ``mig_slice`` the profile of a MIG instance (``1g.10gb``), None for a whole GPU. A fact that a
    kind of device does not report is None.
    """

    kind: Literal["cpu", "cuda", "rocm", "xpu"]
    name: str
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    cache_bytes: int | None = None
    shared_memory_bytes: int | None = None
    flags: tuple[str, ...] = ()
    threads: int | None = None
    driver: str | None = None
    versions: tuple[tuple[str, str], ...] = ()
    max_clock_mhz: int | None = None
    mig_slice: str | None = None

    def version(self, package: str) -> str | None:
        return dict(self.versions).get(package)

    @property
    def torch_device(self) -> str:
        """The name torch uses; ROCm devices answer to ``cuda`` there."""
        return "cuda" if self.kind == "rocm" else self.kind

    def to_dict(self) -> dict[str, Any]:
        out = to_plain(self)
        out["versions"] = dict(self.versions)
        out["flags"] = list(self.flags)
        out["capability"] = list(self.capability) if self.capability else None
        return out

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Device:
        values = dict(data)
        values["versions"] = tuple(sorted(dict(values["versions"]).items()))
        values["flags"] = tuple(values["flags"])
        values["capability"] = tuple(values["capability"]) if values["capability"] else None
        return Device(**values)
