"""Tuned Triton settings as the files that vLLM and SGLang read, and back.

Both engines look for one JSON file for each layer shape and device. Its name says the local
experts, the intermediate size of one rank, the device and the data type; its keys are token counts,
its values the kernel's settings, and the nearest key serves. The two differ:

========================  =========================================  ==============================
what                      vLLM                                       SGLang
========================  =========================================  ==============================
folder                    ``$VLLM_TUNED_CONFIG_FOLDER``              ``$SGLANG_MOE_CONFIG_DIR``
                                                                     ``/configs/triton_3_7_1``
N for 4-bit weights       the intermediate size                      half of it (packed bytes)
device                    blanks and slashes become ``_``; any H200  blanks become ``_``
                          is ``NVIDIA_H200``
``triton_version``        a key, dropped when read                   in the folder's name; a key
                                                                     would break the file
``SPLIT_K``               an argument of the kernel, 1               no argument of the kernel
========================  =========================================  ==============================

Sources: ``get_config_file_name``, ``get_moe_configs`` and ``try_get_optimal_moe_config`` of vLLM
0.32 (``fused_moe/fused_moe.py``) and of SGLang (``triton_utils/fused_moe_triton_config.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autosel.core import Decision, Device, Params, Problem
from autosel.errors import UnsupportedError, field_error

#: The backend whose parameters have the engines' names and meaning.
BACKEND = "triton"
ENGINES = ("vllm", "sglang")
#: Settings that travel, in the order in which the engines' own files have them.
SETTINGS = (
    "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages",
)  # fmt: skip
#: Settings in the engines' files that our kernel does not have.
OTHERS = ("SPLIT_K", "waves_per_eu", "matrix_instr_nonkdim", "kpack", "USE_TMA")
_DTYPES = {4: "int4_w4a16", 8: "int8_w8a16"}
#: Files of the engines have some 20 entries of some 200 bytes.
_MAX_BYTES = 1 << 20
_MAX_TOKENS = 1 << 24

_NAME = re.compile(
    r"E=(?P<experts>\d+),N=(?P<n>\d+),device_name=(?P<device>[^,/\\]+)"
    r"(?:,dtype=(?P<dtype>\w+))?(?:,block_shape=\[\d+, ?\d+\])?(?:,per_channel_quant=True)?"
    r"(?P<down>_down)?\.json"
)


@dataclass(frozen=True, slots=True)
class TunedFile:
    """``path`` below the folder that the engine is told of; ``environment`` tells it."""

    engine: str
    path: str
    content: Mapping[str, Any] = field(repr=False)
    environment: str

    @property
    def text(self) -> str:
        return json.dumps(self.content, indent=4) + "\n"


def tuned_file(
    engine: str, problem: Problem, device: Device, decisions: Iterable[Decision]
) -> TunedFile:
    """The file of ``engine`` for a layer; ``decisions`` are among :data:`BACKEND` settings only.

    Raises UnsupportedError for what the engines have no file for: another kind of device, GEMMs of
    different bits, no decision at all.
    """
    if engine not in ENGINES:
        raise UnsupportedError(
            field_error("export", "format", engine, "one of " + ", ".join(ENGINES))
        )
    if device.kind == "cpu":
        raise UnsupportedError(field_error("export", "device", "cpu", "cuda, rocm or xpu"))
    if problem.w13.num_bits != problem.w2.num_bits:
        found = f"{problem.w13.num_bits} and {problem.w2.num_bits} bits"
        raise UnsupportedError(field_error("export", "weights", found, "one number of bits"))
    version = device.version("triton")
    entries = {str(d.bucket.measured): _settings(engine, d.winner.params_dict) for d in decisions}
    if not entries:
        raise UnsupportedError(
            field_error("export", f"measured settings of {BACKEND}", "none", "at least one")
        )
    entries = dict(sorted(entries.items(), key=lambda item: int(item[0])))
    name = file_name(engine, problem, device.name)
    if engine == "vllm":
        head = {"triton_version": version} if version else {}
        return TunedFile(engine, name, {**head, **entries}, "VLLM_TUNED_CONFIG_FOLDER")
    if not version:
        raise UnsupportedError(field_error("export", "triton", "unknown version", "a version"))
    folder = f"configs/triton_{version.replace('.', '_')}"
    return TunedFile(engine, f"{folder}/{name}", entries, "SGLANG_MOE_CONFIG_DIR")


def file_name(engine: str, problem: Problem, device_name: str) -> str:
    """The name that ``engine`` looks for; WNA16 layers have no ``block_shape`` in it.

    Both write ``block_shape=[n,k]`` only where both numbers are not 0, and for weight-only group
    scales n is 0: one file serves every group size.
    """
    bits, n = problem.w13.num_bits, problem.intermediate_size
    if engine == "sglang":
        n //= 8 // bits  # bytes: it reads the packed tensor's shape
        device = device_name.replace(" ", "_")
    else:
        device = re.sub(r"[\s/]+", "_", device_name)
        if "H200" in device.split("_"):
            device = "NVIDIA_H200"
    name = f"E={problem.num_local_experts},N={n},device_name={device},dtype={_DTYPES[bits]}.json"
    if not device or not name.isprintable() or set(name) & set("/\\:"):
        raise UnsupportedError(
            field_error("export", "device name", repr(device_name), "one that a file name can hold")
        )
    return name


def _settings(engine: str, params: Params) -> dict[str, Any]:
    found = {name: params[name] for name in SETTINGS if name in params}
    missing = [name for name in SETTINGS if name not in found]
    if missing:
        raise UnsupportedError(field_error("export", "settings", "no " + missing[0], "all"))
    if engine == "vllm":
        first = {name: found[name] for name in SETTINGS[:4]}
        return {**first, "SPLIT_K": 1, **{name: found[name] for name in SETTINGS[4:]}}
    return found


# and back ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartingPoints:
    """Settings of ``backend`` by token count, and what was left out of the file, in words."""

    params: Mapping[int, Params]
    notes: tuple[str, ...] = ()
    backend: str = BACKEND

    def near(self, num_tokens: int) -> list[Params]:
        """The settings of the nearest token counts, the nearest first; two at most."""
        keys = sorted(self.params, key=lambda key: (abs(key - num_tokens), key))
        return list({str(p): p for p in (self.params[key] for key in keys[:2])}.values())


def read_tuned(path: str | Path) -> StartingPoints:
    """Read a tuned file of vLLM or SGLang as starting points of a search.

    They are proposals: each is checked against the kernel's rules, verified and timed like any
    other. Raises UnsupportedError in one line for a file that is none: too large, no JSON, other
    keys or types.
    """
    file = Path(path)
    data = _object(file)
    notes: list[str] = []
    name = _NAME.fullmatch(file.name)
    if name is None:
        notes.append(f"{file.name} is not named as the engines name their files")
    elif name["dtype"] not in _DTYPES.values():
        notes.append(f"tuned for {name['dtype'] or '16-bit weights'}, not for 4 or 8 bit weights")
    points: dict[int, Params] = {}
    dropped: set[str] = set()
    for key, value in data.items():
        if key == "triton_version":
            continue
        where = f"{file}: {key[:40]!r}"
        if not (key.isascii() and key.isdecimal() and len(key) < 9 and 0 < int(key) <= _MAX_TOKENS):
            raise UnsupportedError(field_error(where, "key", "text", "a token count"))
        if not isinstance(value, dict):
            raise UnsupportedError(field_error(where, "value", type(value).__name__, "an object"))
        points[int(key)] = _point(where, value, dropped)
    if not points:
        raise UnsupportedError(field_error(str(file), "token counts", "none", "at least one"))
    if dropped:
        notes.append(f"settings that our kernel does not have: {', '.join(sorted(dropped))}")
    return StartingPoints(points, tuple(notes))


def _object(file: Path) -> dict[str, Any]:
    try:
        size = file.stat().st_size
        if size > _MAX_BYTES:
            raise UnsupportedError(field_error(str(file), "bytes", size, f"at most {_MAX_BYTES}"))
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise UnsupportedError(f"{file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"{file}: not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UnsupportedError(
            field_error(str(file), "top level", type(data).__name__, "an object")
        )
    return data


def _point(where: str, value: Mapping[str, Any], dropped: set[str]) -> Params:
    found: dict[str, int] = {}
    for name, number in value.items():
        if name in OTHERS:
            if not (name == "SPLIT_K" and number == 1):
                dropped.add(name)
            continue
        if name not in SETTINGS:
            expected = "one of " + ", ".join(SETTINGS)
            raise UnsupportedError(field_error(where, "setting", repr(name[:40]), expected))
        whole = isinstance(number, int) and not isinstance(number, bool)
        if not (whole and 1 <= number <= 1 << 16):
            expected = "a whole number from 1 to 65536"
            raise UnsupportedError(field_error(where, name, repr(number)[:40], expected))
        found[name] = number
    return found
