"""Canonical JSON, keys in files, and what a signature covers."""

import base64
import json
import pickle

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from opal_deploy.errors import UsageError
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.records.record import to_record
from opal_deploy.records.signatures import PASSPHRASE_VARIABLE, PublicKeys, Signer, canonical_json
from tests.records.test_schema import FAILED, OK, validator


def test_a_lone_surrogate_is_an_escape_and_numbers_that_no_reader_keeps_are_refused():
    assert canonical_json({"b": 1e21, "a": "\udcff\x7f\u2028"}) == b'{"a":"\\udcff\x7f\xe2\x80\xa8","b":1e+21}'
    for number in (1 << 60, float("nan")):
        with pytest.raises(ValueError, match=r"safe integer|not representable"):
            canonical_json([number])
    with pytest.raises(ValueError, match="private-use"):
        canonical_json("\ud800" + "".join(map(chr, range(0xE000, 0xF900))))


def write(path, key, *, public=False, passphrase=None, form=serialization.PrivateFormat.PKCS8):
    """Write a key to a PEM file, which only its owner can read; return the path."""
    pem = serialization.Encoding.PEM
    if public:
        data = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    else:
        kind = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        data = key.private_bytes(pem, form, kind)
    path.touch(0o600)
    path.write_bytes(data)
    return path


@pytest.fixture(autouse=True)
def _no_passphrase(monkeypatch):
    monkeypatch.delenv(PASSPHRASE_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A folder with the files that the table below names."""
    folder = tmp_path_factory.mktemp("keys")
    ours, other = ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048)
    write(folder / "key.pem", ours)
    write(folder / "public.pem", ours, public=True)
    write(folder / "encrypted.pem", ours, passphrase=b"secret")
    write(folder / "rsa.pem", other)
    write(folder / "rsa-public.pem", other, public=True)
    write(folder / "ssh.pem", ours, form=serialization.PrivateFormat.OpenSSH)
    (folder / "text.pem").write_text("key")
    for kind in ("PRIVATE", "PUBLIC"):
        (folder / f"damaged-{kind}.pem").write_text(f"-----BEGIN {kind} KEY-----\nAAAA\n-----END {kind} KEY-----\n")
    return folder


@pytest.mark.parametrize(
    ("name", "passphrase", "message"),
    [
        ("missing.pem", None, "cannot be read"),
        ("text.pem", None, "no key found"),
        ("public.pem", None, "a public key found"),
        ("rsa.pem", None, "RSAPrivateKey found"),
        ("damaged-PRIVATE.pem", None, "damaged"),
        ("encrypted.pem", None, f"set {PASSPHRASE_VARIABLE}"),
        ("encrypted.pem", "wrong", "is wrong"),
        ("encrypted.pem", "secret", None),
        ("ssh.pem", None, "not in PKCS#8"),
    ],
)
def test_a_private_key_is_read_or_refused_in_one_line(keys, monkeypatch, name, passphrase, message):
    if passphrase is not None:
        monkeypatch.setenv(PASSPHRASE_VARIABLE, passphrase)
    if message is None:
        assert len(Signer(keys / name, print).fingerprint) == 64
        return
    with pytest.raises(UsageError) as caught:
        Signer(keys / name, print)
    assert str(caught.value).startswith(f"--sign {keys / name}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    # nothing that holds the key's bytes or the passphrase travels with the error
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_bad_public_key_is_refused(keys):
    named = {"missing": "cannot be read", "key": "a private key", "rsa-public": "Ed25519", "damaged-PUBLIC": "damaged"}
    for name, message in named.items():
        with pytest.raises(UsageError, match=message):
            PublicKeys([keys / f"{name}.pem"])


def test_a_key_that_others_can_read_is_warned_of_and_never_leaves_its_process(keys, tmp_path):
    lines, key = [], tmp_path / "key.pem"
    key.write_bytes((keys / "key.pem").read_bytes())
    key.chmod(0o640)
    signer = Signer(key, lines.append)
    assert len(lines) == 1
    assert "chmod 600" in lines[0]
    assert repr(signer) == f"<Signer {signer.fingerprint}>"
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(signer)


SURROGATE = {**OK, "label": "\udcff\ue000", "margin": 1e-7}


@pytest.mark.parametrize("record", [OK, FAILED, SURROGATE])
def test_a_signature_holds_after_any_tool_for_json_and_for_no_other_record(keys, record):
    public = PublicKeys([keys / "public.pem"])
    signed = Signer(keys / "key.pem", print).sign(to_record(record))
    line = json.loads(to_json_line(signed))
    validator(strict=True).validate(line)
    assert public.find_fault(line) == ""
    # other notations of the same values
    assert public.find_fault(json.loads(json.dumps(line, sort_keys=True).replace(".0,", ","))) == ""
    for changed in changes(line):
        assert public.find_fault(changed), changed
    assert public.find_fault(record) == "it is not signed"


def changes(record):
    """Yield the record with each field, its signature's too, left out or changed, and one added."""
    for key in record.keys() - {"signature"}:
        yield {name: value for name, value in record.items() if name != key}
        yield {**record, key: "other"}
    for key in record["signature"]:
        yield {**record, "signature": {**record["signature"], key: "other"}}
    yield {**record, "note": 1}


def test_a_signature_covers_the_keys_of_later_versions(keys):
    signer, public = Signer(keys / "key.pem", print), PublicKeys([keys / "public.pem"])
    later = {**OK, "later": {"b": [1.0], "a": 2}, "signature": {"algorithm": "ed25519", "key": signer.fingerprint}}
    value = base64.b64encode(signer._key.sign(canonical_json(later))).decode()
    line = {**later, "signature": {**later["signature"], "value": value}}
    assert public.find_fault(line) == ""
    assert public.find_fault({**line, "later": {"b": [1.5], "a": 2}}) == "changed after it was signed"


def test_keys_are_rotated_by_naming_both(keys):
    new = ed25519.Ed25519PrivateKey.generate()
    write(keys / "new.pem", new)
    write(keys / "new-public.pem", new, public=True)
    records = [to_document(Signer(keys / name, print).sign(to_record(OK))) for name in ("key.pem", "new.pem")]
    both = PublicKeys([keys / "public.pem", keys / "new-public.pem"])
    assert [both.find_fault(record) for record in records] == ["", ""]
    assert "another key" in PublicKeys([keys / "new-public.pem"]).find_fault(records[0])
    # one key's signature under the other's name
    forged = {**records[0], "signature": {**records[0]["signature"], "key": records[1]["signature"]["key"]}}
    assert both.find_fault(forged) == "changed after it was signed"


def test_a_key_stands_alone_in_its_file(keys, tmp_path):
    key = (keys / "public.pem").read_bytes()
    for name, data in (("two", 2 * key), ("zeros", key + bytes(70_000)), ("padded", key + b"\0"), ("cut", key[:-8])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match="one"):
            PublicKeys([tmp_path / name])
