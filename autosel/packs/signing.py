"""Ed25519 signatures of packs, with keys as ``openssl`` makes them.

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out pub.pem

What is signed is the canonical content (:func:`autosel.packs.content.content`), so that openssl
verifies it as well: ``autosel pack inspect PACK --content FILE`` writes it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from autosel.errors import AutoselError, MissingPackageError, PackError, field_error
from autosel.packs.content import content, sealed
from autosel.packs.model import Pack, Signature

#: Names a public key file; packs that are looked up must then be signed with it.
ENVIRONMENT = "AUTOSEL_PACK_KEY"
_MAX_KEY_BYTES = 1 << 16


def sign(pack: Pack, key: str | Path) -> Pack:
    """``pack``, sealed and signed with the private key in a PEM file without a password.

    Raises AutoselError for a file that is no such key, MissingPackageError without the extra.
    """
    private = _load(key, private=True)
    made = sealed(pack)
    return replace(
        made, signature=Signature(_key_id(private.public_key()), private.sign(content(made)))
    )


def verify(pack: Pack, key: str | Path, where: str) -> None:
    """PackError unless ``pack`` is signed with the private part of this public key (PEM file)."""
    public = _load(key, private=False)
    expected = f"signed with the key {_key_id(public)[:16]} of {key}"
    if pack.signature is None:
        raise PackError(field_error(where, "signature", "none", expected))
    if pack.signature.key_id != _key_id(public):
        found = f"one with the key {pack.signature.key_id[:16]}"
        raise PackError(field_error(where, "signature", found, expected))
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(pack.signature.value, content(pack))
    except InvalidSignature:
        found = "one that does not fit the content"
        raise PackError(field_error(where, "signature", found, expected)) from None


def required_key() -> str | None:
    """The public key that packs must be signed with here, if the user asks for one."""
    return os.environ.get(ENVIRONMENT) or None


def _load(path: str | Path, *, private: bool) -> Any:
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingPackageError(
            "signatures need the package cryptography: pip install 'autosel-moe[sign]'"
        ) from None
    kind = "private" if private else "public"
    wanted = f"an Ed25519 {kind} key in PEM form" + (" without a password" if private else "")
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise AutoselError(field_error(str(path), "key", error.strerror, wanted)) from None
    try:
        if private:
            key: Any = serialization.load_pem_private_key(raw, password=None)
            right = isinstance(key, ed25519.Ed25519PrivateKey)
        else:
            key = serialization.load_pem_public_key(raw)
            right = isinstance(key, ed25519.Ed25519PublicKey)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise AutoselError(field_error(str(path), "key", "something else", wanted)) from None
    if not right:
        raise AutoselError(field_error(str(path), "key", "another kind of key", wanted))
    return key


def _key_id(public: Any) -> str:
    from cryptography.hazmat.primitives import serialization

    der = public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()
