"""Signatures of records and of run.json: Ed25519 over the document's canonical JSON, in its field `signature`.

A signature covers every other field of the document, even fields that a later version adds, and its own except `value`.
Light to import: `cryptography` is loaded with a key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from opal_deploy.errors import UsageError, require
from opal_deploy.logs import Log, WarningLine
from opal_deploy.options import StrPath
from opal_deploy.records.lines import to_document
from opal_deploy.records.record import Record, Signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM = "ed25519"
PASSPHRASE_VARIABLE = "OPAL_DEPLOY_SIGNING_PASSPHRASE"
_REQUIRED = ("algorithm", "key", "value")
# a key has about 120 bytes
_MAX_KEY_BYTES = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")
_NEW_KEY = "make one with: openssl genpkey -algorithm ed25519 -out key.pem"
_GET_PUBLIC = "get it with: openssl pkey -in key.pem -pubout -out public.pem"


class Signer:
    """Signs records with a private key, which is never pickled or shown.

    Attributes:
        fingerprint: hex sha256 of the public key in DER (SubjectPublicKeyInfo).
    """

    def __init__(self, path: StrPath, log: Log) -> None:
        """Read a PEM file with an Ed25519 private key in PKCS#8; its passphrase is in OPAL_DEPLOY_SIGNING_PASSPHRASE.

        Logs a warning if other users can read the file.

        Raises:
            UsageError: the file cannot be read, holds no such key, or the passphrase is missing or wrong.
            MissingExtra: `cryptography` is not installed.
        """
        self._key = _read_private_key(path)
        self.fingerprint = _fingerprint(self._key.public_key())
        if os.name == "posix" and (mode := Path(path).stat().st_mode & 0o777) & 0o044:
            readable = f"other users can read this key (mode {mode:04o}); run: chmod 600 {path}"
            log(WarningLine(f"warning: --sign {path}: {readable}"))

    def sign(self, record: Record, run: str | None = None) -> Record:
        """Return a finished record with its `signature`, made now; `run` is the id of the run that it belongs to."""
        signature = self.sign_document(to_document(record), run)
        return msgspec.structs.replace(record, signature=Signature(**signature))

    def sign_document(self, document: Mapping[str, Any], run: str | None = None) -> dict[str, str]:
        """Return the `signature` of a document of JSON, made now."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        unsigned = {"algorithm": ALGORITHM, "key": self.fingerprint, "time": now}
        if run is not None:
            unsigned["run"] = run
        value = self._key.sign(canonical_json({**document, "signature": unsigned}))
        return {**unsigned, "value": base64.b64encode(value).decode()}

    def __repr__(self) -> str:
        return f"<Signer {self.fingerprint}>"


class PublicKeys:
    """The public keys whose signatures are accepted."""

    def __init__(self, paths: Sequence[StrPath]) -> None:
        """Read PEM files; raise UsageError or MissingExtra as `Signer` does."""
        self._keys = {_fingerprint(key): key for key in map(_read_public_key, paths)}

    def find_fault(self, document: Mapping[str, Any]) -> str:
        """Return why a document has no valid signature by one of the keys; empty if it has one."""
        from cryptography.exceptions import InvalidSignature

        signature = document.get("signature")
        if signature is None:
            return "it is not signed"
        if not isinstance(signature, dict) or not all(isinstance(signature.get(key), str) for key in _REQUIRED):
            return "its signature is damaged"
        if signature["algorithm"] != ALGORITHM:
            return f"signed with {signature['algorithm'][:20]!r}; expected {ALGORITHM}"
        if (key := self._keys.get(signature["key"])) is None:
            return f"signed with another key, {signature['key'][:16]}"
        unsigned = {name: text for name, text in signature.items() if name != "value"}
        try:
            value = base64.b64decode(signature["value"], validate=True)
            key.verify(value, canonical_json({**document, "signature": unsigned}))
        except (InvalidSignature, ValueError, RecursionError):
            return "changed after it was signed"
        return ""


class SignatureDigest:
    """The SHA-256 over the signatures of a run's records, in order, which run.json holds.

    A record that is removed, repeated, moved or replaced changes it.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def add(self, signature: Signature | None) -> None:
        """Add the signature of the next record; None for a record without one."""
        self._sha256.update(b"\n" if signature is None else f"{signature.value}\n".encode("utf-8", "replace"))

    def hexdigest(self) -> str:
        """Return the digest so far."""
        return self._sha256.hexdigest()


def canonical_json(document: Any) -> bytes:
    """Return a document in the JSON Canonicalization Scheme (RFC 8785).

    Lone surrogates, which the RFC does not have, become escapes, as in ECMAScript's JSON.stringify.

    Raises:
        ValueError: a number is not finite, an integer is beyond 2^53, which not every JSON reader keeps, or there are
            lone surrogates and all private-use characters.
    """
    import rfc8785

    text = json.dumps(document, ensure_ascii=False)
    if not _SURROGATE.search(text):
        return rfc8785.dumps(document)
    # a character that the document does not have stands for the backslash of an escape
    if (mark := next((char for char in map(chr, range(0xE000, 0xF900)) if char not in text), None)) is None:
        raise ValueError("lone surrogates next to all private-use characters")
    marked = json.loads(_SURROGATE.sub(lambda match: f"{mark}{ord(match[0]):04x}", text))
    return rfc8785.dumps(marked).replace(mark.encode(), b"\\u")


def _fingerprint(key: Ed25519PublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _read_private_key(path: StrPath) -> Ed25519PrivateKey:
    data, passphrase = _read_pem(path, "--sign", "private", _NEW_KEY), os.environ.get(PASSPHRASE_VARIABLE)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    is_encrypted = b"ENCRYPTED" in data
    if is_encrypted and not passphrase:
        raise UsageError(f"--sign {path}: the key has a passphrase; set {PASSPHRASE_VARIABLE}")
    secret = (passphrase or "").encode("utf-8", "surrogateescape") if is_encrypted else None
    try:
        key = load_pem_private_key(data, secret)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        problem = f"the passphrase in {PASSPHRASE_VARIABLE} is wrong" if is_encrypted else f"not in PKCS#8; {_NEW_KEY}"
        raise UsageError(f"--sign {path}: damaged, or {problem}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(f"--sign {path}: {type(key).__name__} found; expected an Ed25519 private key; {_NEW_KEY}")
    return key


def _read_public_key(path: StrPath) -> Ed25519PublicKey:
    data = _read_pem(path, "--public-key", "public", _GET_PUBLIC)
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key: object = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"--public-key {path}: not an Ed25519 key, or damaged; {_GET_PUBLIC}")
    return key


def _read_pem(path: StrPath, option: str, kind: Literal["private", "public"], hint: str) -> bytes:
    """Return the text of a file that holds one key of a kind and nothing else."""
    for module in ("cryptography", "rfc8785"):
        require(module, "sign", option)
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MAX_KEY_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be read ({error.strerror or error}); expected a PEM file") from None
    keys = re.findall(rb"-----BEGIN (?:[A-Z]+ )*?(PRIVATE|PUBLIC) KEY-----", data)
    if keys != [kind.upper().encode()]:
        names = ", ".join(f"a {key.decode().lower()} key" for key in keys) or "no key"
        raise UsageError(f"{option} {path}: {names} found; expected one Ed25519 {kind} key; {hint}")
    if len(data) > _MAX_KEY_BYTES or not re.search(rb"-----END [A-Z ]+-----\s*\Z", data):
        raise UsageError(f"{option} {path}: something follows the key, or its end is missing; expected one key")
    return data
