"""Canonical JSON, keys in files, and what a signature covers."""

import base64
import copy
import json
import os
import pickle
import struct
import threading

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from opal_deploy.errors import UsageError
from opal_deploy.records.lines import to_document, to_json_line
from opal_deploy.records.record import to_record
from opal_deploy.records.signatures import PASSPHRASE_VARIABLE, PublicKeys, Signer, canonical_json
from tests.records.test_schema import FAILED, OK, validator

# RFC 8785, appendix B: the bits of a number, and how it is printed
NUMBERS = {
    0x0000000000000000: "0", 0x8000000000000000: "0", 0x0000000000000001: "5e-324", 0x8000000000000001: "-5e-324",
    0x7FEFFFFFFFFFFFFF: "1.7976931348623157e+308", 0x4340000000000000: "9007199254740992",
    0xC340000000000000: "-9007199254740992", 0x4430000000000000: "295147905179352830000",
    0x44B52D02C7E14AF5: "9.999999999999997e+22", 0x44B52D02C7E14AF6: "1e+23",
    0x44B52D02C7E14AF7: "1.0000000000000001e+23", 0x444B1AE4D6E2EF4E: "999999999999999700000",
    0x444B1AE4D6E2EF4F: "999999999999999900000", 0x444B1AE4D6E2EF50: "1e+21",
    0x3EB0C6F7A0B5ED8C: "9.999999999999997e-7", 0x3EB0C6F7A0B5ED8D: "0.000001",
    0x41B3DE4355555553: "333333333.3333332", 0x41B3DE4355555557: "333333333.33333343",
    0xBECBF647612F3696: "-0.0000033333333333333333", 0x43143FF3C1CB0959: "1424953923781206.2",
}  # fmt: skip


@pytest.mark.parametrize(("bits", "expected"), NUMBERS.items())
def test_numbers_are_printed_as_the_rfc_prints_them(bits, expected):
    (value,) = struct.unpack(">d", bits.to_bytes(8))
    assert canonical_json(value).decode() == expected


def test_documents_are_canonical():
    # RFC 8785, 3.2.2 and 3.2.3
    text = r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
        "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    expected = r"""{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\u000f\nA'B\"\\\\\"/"}"""  # noqa: E501
    assert canonical_json(json.loads(text)).decode() == expected
    assert canonical_json({"a": "\udcff\x7f\u2028"}) == b'{"a":"\\udcff\x7f\xe2\x80\xa8"}'
    for number in (1 << 60, float("nan")):
        with pytest.raises(ValueError, match=r"exceeds safe integer domain|not representable"):
            canonical_json([number])


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
    write(
        folder / "ec.pem",
        ec.generate_private_key(ec.SECP256R1()),
        form=serialization.PrivateFormat.TraditionalOpenSSL,
    )
    (folder / "text.pem").write_text("key")
    (folder / "folder").mkdir()
    for kind in ("PRIVATE", "PUBLIC"):
        (folder / f"damaged-{kind}.pem").write_text(f"-----BEGIN {kind} KEY-----\nAAAA\n-----END {kind} KEY-----\n")
    return folder


BAD_KEYS = [
    ("missing.pem", None, "cannot be read (No such file or directory)"),
    ("folder", None, "cannot be read (Is a directory)"),
    ("text.pem", None, "not a PEM file"),
    ("public.pem", None, "a public key found; expected an Ed25519 private key"),
    ("rsa.pem", None, "RSAPrivateKey found; expected an Ed25519 private key"),
    ("ec.pem", None, "found; expected an Ed25519 private key"),
    ("damaged-PRIVATE.pem", None, "damaged, or not in PKCS#8"),
    ("encrypted.pem", None, f"the key has a passphrase; set {PASSPHRASE_VARIABLE}"),
    ("encrypted.pem", "wrong", f"the passphrase in {PASSPHRASE_VARIABLE} is wrong"),
    ("encrypted.pem", "secret", None),
    ("key.pem", "secret", None),
    ("ssh.pem", None, "not in PKCS#8"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "passphrase", "message"), BAD_KEYS)
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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.pem", "cannot be read"),
        ("key.pem", "a private key found; expected an Ed25519 public key"),
        ("rsa-public.pem", "RSAPublicKey found"),
        ("damaged-PUBLIC.pem", "damaged"),
        ("text.pem", "not a PEM file"),
    ],
)
def test_a_bad_public_key_is_refused_in_one_line(keys, name, message):
    with pytest.raises(UsageError) as caught:
        PublicKeys([keys / name])
    assert message in str(caught.value)


def test_a_key_that_others_can_read_is_warned_of(keys):
    lines = []
    Signer(keys / "key.pem", lines.append)
    assert lines == []
    key = keys / "key.pem"
    key.chmod(0o640)
    Signer(key, lines.append)
    key.chmod(0o600)
    expected = f"warning: --sign {key}: other users can read this key (mode 0640); run: chmod 600 {key}"
    assert lines == [expected]


def test_a_signer_never_leaves_its_process(keys):
    signer = Signer(keys / "key.pem", print)
    assert repr(signer) == f"<Signer {signer.fingerprint}>"
    with pytest.raises(TypeError, match="cannot pickle"):
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
    assert (
        public.find_fault(json.loads(json.dumps(line, indent=2, sort_keys=True), parse_float=lambda x: float(x))) == ""
    )
    assert public.find_fault(json.loads(json.dumps(line).replace(".0,", ","))) == ""
    for changed in changes(line):
        assert public.find_fault(changed), changed
    assert public.find_fault(record) == "it is not signed"


def changes(record):
    """Yield the record with each field, its signature's too, left out, changed, and one added."""
    for holder in (record, record["signature"]):
        for key in holder:
            for act in ("remove", "change"):
                changed = copy.deepcopy(record)
                part = changed["signature"] if holder is record["signature"] else changed
                if act == "remove" and holder is record:
                    del part[key]
                elif act == "change" and key != "signature":
                    part[key] = "other"
                else:
                    continue
                yield changed
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
    forged = copy.deepcopy(records[0])
    forged["signature"]["key"] = records[1]["signature"]["key"]
    assert both.find_fault(forged) == "changed after it was signed"


def test_a_key_stands_alone_in_its_file(keys, tmp_path):
    key = (keys / "public.pem").read_bytes()
    for name, data in (("two", 2 * key), ("zeros", key + bytes(70_000)), ("padded", key + b"\0"), ("cut", key[:-8])):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UsageError, match=r"expected a file with one key\Z"):
            PublicKeys([tmp_path / name])


def test_a_key_may_come_from_a_pipe(keys, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[(keys / "public.pem").read_bytes()])
    writer.start()
    assert PublicKeys([pipe])._keys.keys() == PublicKeys([keys / "public.pem"])._keys.keys()
    writer.join()
