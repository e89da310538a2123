"""A pack as bytes: its canonical text, its content hash, reading it from a file and writing it.

The hash is the SHA-256 of the canonical JSON (keys sorted, no spaces, UTF-8, Python's shortest
float texts) of everything but ``sha256`` and ``signature``. A pack that was reformatted is still
itself; one that says anything else is not. In Python alone::

    data = json.load(open("autosel-pack.json")); data.pop("signature", None); data.pop("sha256")
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    hashlib.sha256(text.encode()).hexdigest()
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosel import records
from autosel.atomic import atomic_file
from autosel.errors import AutoselError, PackError, field_error
from autosel.packs import fields as f
from autosel.packs.model import Pack, Signature
from autosel.packs.reading import check_version, from_data
from autosel.packs.strict_json import parse, read_bytes, shown
from autosel.packs.writing import to_data

ALGORITHM = "ed25519"


def canonical(data: Any) -> bytes:
    """The one text of a JSON value."""
    try:
        return records.to_json(data).encode("utf-8")
    except UnicodeEncodeError as error:
        raise PackError(field_error("pack", "text", shown(error.object[:40]), "UTF-8")) from None


def content(pack: Pack) -> bytes:
    """What is hashed and signed."""
    return canonical(to_data(pack))


def sealed(pack: Pack) -> Pack:
    """``pack`` with the hash of its content and no signature."""
    return replace(pack, sha256=hashlib.sha256(content(pack)).hexdigest(), signature=None)


def read(path: str | Path) -> Pack:
    """The pack in a file. Raises PackError, in one line, for anything but a whole, sound pack.

    Whether it may be used here is another question (:mod:`autosel.packs.grade`), and so is who
    signed it (:func:`autosel.packs.signing.verify`).
    """
    place = Path(path)
    return from_bytes(read_bytes(place), str(place))


def from_bytes(raw: bytes, where: str) -> Pack:
    """The pack in ``raw``; ``where`` begins every message."""
    data = parse(raw, where)
    check_version(data, where)
    said = f.sha256(data.pop("sha256", None), f"{where}: sha256")
    signature = f.optional(data.pop("signature", None), f"{where}: signature", _signature)
    if not _is_hash_of_canonical(raw, said):
        try:
            found = hashlib.sha256(canonical(data)).hexdigest()
        except AutoselError as error:
            raise PackError(f"{where}: {error}") from None
        if found != said:
            raise PackError(field_error(where, "sha256 of the content", found, said))
    return replace(from_data(data, where), sha256=said, signature=signature)


def _is_hash_of_canonical(raw: bytes, said: str) -> bool:
    """Whether ``raw`` without its hash and signature has the hash ``said``, byte by byte.

    True spares writing the content again, a third of the time that reading takes. False only says
    that the file is not in canonical form, or damaged.
    """
    mark = f',"sha256":"{said}"'.encode()
    at = raw.rfind(mark)
    if at < 0:
        return False
    rest = raw[at + len(mark) :].removesuffix(b"\n")
    if rest.startswith(b',"signature":{'):
        rest = rest[rest.index(b"}") + 1 :]
    return hashlib.sha256(raw[:at] + rest).hexdigest() == said


def to_bytes(pack: Pack) -> bytes:
    """The file of a sealed pack: canonical text and a final line break."""
    data = to_data(pack)
    found = hashlib.sha256(canonical(data)).hexdigest()
    if pack.sha256 != found:
        raise PackError(field_error("pack", "sha256", pack.sha256 or "none", found))
    data["sha256"] = found
    if pack.signature is not None:
        data["signature"] = {
            "algorithm": ALGORITHM,
            "key_id": pack.signature.key_id,
            "value": base64.b64encode(pack.signature.value).decode("ascii"),
        }
    return canonical(data) + b"\n"


def write(pack: Pack, path: str | Path) -> None:
    """Write a sealed pack; the file appears whole or not at all."""
    raw = to_bytes(pack)
    from_bytes(raw, str(path))  # what nobody could read again is not written
    with atomic_file(path) as partial:
        partial.write_bytes(raw)


def _signature(value: Any, where: str) -> Signature:
    f.object_of(value, where, ("algorithm", "key_id", "value"))
    f.choice(value["algorithm"], f"{where}.algorithm", (ALGORITHM,))
    text = f.text(value["value"], f"{where}.value", most=200)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 64 or base64.b64encode(raw).decode("ascii") != text:
        f.refuse(f"{where}.value", "signature", shown(text), "64 bytes in base64")
    return Signature(f.sha256(value["key_id"], f"{where}.key_id"), raw)
