"""Signatures against openssl: its keys sign here, and it verifies what was signed here."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys

import pytest

from autosel.errors import AutoselError, MissingPackageError, PackError
from autosel.packs import content, signing
from tests.packs.made import entry, pack, resealed

openssl = shutil.which("openssl")
pytestmark = pytest.mark.skipif(openssl is None, reason="openssl is not installed")


def run(*words):
    done = subprocess.run([openssl, *map(str, words)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def keys(folder, name="key", *algorithm):
    run("genpkey", *(algorithm or ("-algorithm", "ed25519")), "-out", folder / f"{name}.pem")
    run("pkey", "-in", folder / f"{name}.pem", "-pubout", "-out", folder / f"{name}.pub")
    return folder / f"{name}.pem", folder / f"{name}.pub"


@pytest.fixture
def pair(tmp_path):
    return keys(tmp_path)


def test_openssl_verifies_what_was_signed(tmp_path, pair):
    private, public = pair
    content.write(signing.sign(pack(), private), tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_bytes())
    signature = values.pop("signature")
    values.pop("sha256")
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    (tmp_path / "body").write_text(text, encoding="utf-8")
    (tmp_path / "sig").write_bytes(base64.b64decode(signature["value"]))
    words = ("-pubin", "-inkey", public, "-rawin", "-in", tmp_path / "body")
    assert b"Successfully" in run("pkeyutl", "-verify", *words, "-sigfile", tmp_path / "sig")
    der = run("pkey", "-pubin", "-in", public, "-outform", "DER")
    assert hashlib.sha256(der).hexdigest() == signature["key_id"]


def test_what_openssl_signed_is_verified_here(tmp_path, pair):
    private, public = pair
    (tmp_path / "body").write_bytes(content.content(pack()))
    words = ("-inkey", private, "-rawin", "-in", tmp_path / "body")
    raw = run("pkeyutl", "-sign", *words)
    made = signing.sign(pack(), private)
    assert made.signature.value == raw  # Ed25519 has one signature for a key and a text
    signing.verify(made, public, "p.json")


def test_a_signed_pack_reads_back(tmp_path, pair):
    private, public = pair
    made = signing.sign(pack(), private)
    content.write(made, tmp_path / "p.json")
    assert content.read(tmp_path / "p.json") == made
    signing.verify(content.read(tmp_path / "p.json"), public, "p.json")


def refused(made, public, word):
    with pytest.raises(PackError, match=word) as caught:
        signing.verify(made, public, "p.json")
    assert str(caught.value).isprintable()


def test_an_unsigned_pack_and_another_key(tmp_path, pair):
    private, public = pair
    _, other = keys(tmp_path, "other")
    refused(pack(), public, "signature: found none")
    refused(signing.sign(pack(), private), other, "signature: found one with the key")


def test_changed_content_does_not_fit_its_signature(tmp_path, pair):
    """A forger can make the hash fit and cannot make the signature fit."""
    private, public = pair
    content.write(signing.sign(pack(), private), tmp_path / "p.json")
    values = json.loads((tmp_path / "p.json").read_bytes())
    values["entries"][0]["outcomes"][0]["winner_us"] = 1.0
    forged = content.from_bytes(resealed(values), "p.json")
    assert forged.signature is not None
    refused(forged, public, "does not fit the content")


def test_a_signature_of_another_pack_does_not_fit(tmp_path, pair):
    from dataclasses import replace

    private, public = pair
    one = signing.sign(pack(), private)
    two = pack(entry(decided="2026-01-30T09:00:00Z"))
    refused(replace(two, signature=one.signature), public, "does not fit the content")


@pytest.mark.parametrize(
    "algorithm",
    [
        ("-algorithm", "rsa"), ("-algorithm", "ed448"), ("-algorithm", "x25519"),
        ("-algorithm", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        ("-algorithm", "ed25519", "-aes256", "-pass", "pass:secret"),
    ],
    ids=["rsa", "ed448", "x25519", "ec", "password"],
)  # fmt: skip
def test_other_keys_are_refused_by_name(tmp_path, algorithm):
    run("genpkey", *algorithm, "-out", tmp_path / "key.pem")
    with pytest.raises(AutoselError, match="an Ed25519 private key in PEM form"):
        signing.sign(pack(), tmp_path / "key.pem")


def test_files_that_are_no_keys(tmp_path, pair):
    private, public = pair
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "junk").write_bytes(b"-----BEGIN PRIVATE KEY-----\n!!!\n")
    for path in (tmp_path / "empty", tmp_path / "junk", tmp_path / "missing", public, tmp_path):
        with pytest.raises(AutoselError, match="expected an Ed25519 private key"):
            signing.sign(pack(), path)
    with pytest.raises(AutoselError, match="expected an Ed25519 public key"):
        signing.verify(signing.sign(pack(), private), private, "p.json")


def test_without_the_package_one_line_says_what_to_install(tmp_path, pair, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'autosel-moe\[sign\]'"):
        signing.sign(pack(), pair[0])


def test_packs_work_without_the_package():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from tests.packs.made import pack\nfrom autosel.packs import content\n"
        "assert content.from_bytes(content.to_bytes(pack()), 'p.json') == pack()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
