"""`infer --sign` and `verify --public-key`: every record of a run is signed, and no change of one goes unnoticed."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from opal_deploy.artifact.files import compute_sha256
from opal_deploy.auditing.verify_records import CheckOptions, verify_records
from opal_deploy.records.signatures import PublicKeys
from tests.cli.calls import check, one_line, read_results
from tests.records.test_signatures import write
from tests.runs import Infer

CPU = ("--device", "cpu", "--threads", "1")
NODE = shutil.which("node")
PAGE = Path(__file__).parents[2] / "docs/reference/signatures.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_pictures):
    """Keys, and labelled pictures of which one is broken."""
    folder = tmp_path_factory.mktemp("signed")
    for name in ("key", "other"):
        key = ed25519.Ed25519PrivateKey.generate()
        write(folder / f"{name}.pem", key)
        write(folder / f"{name}-public.pem", key, public=True)
    make_pictures(folder / "in/ash", 4)[3].write_bytes(b"no")
    return folder


@pytest.fixture(scope="module")
def infer(opal, exact_model, folder):
    def run(out, *arguments, key="key.pem", code=3):
        signs = ("--sign", key) if key else ()
        device = () if "--ray" in arguments else CPU
        call = opal("infer", "in", "--model", exact_model, *device, "--out", out, *signs, *arguments, cwd=folder)
        assert call.returncode == code, call.stderr
        return call

    return run


@pytest.fixture(scope="module")
def signed(infer, folder):
    infer("out", "--format", "csv", "--labels", "folders")
    return folder / "out"


@pytest.fixture
def verify(opal, exact_model, folder):
    def run(results, *arguments, key="key-public.pem"):
        keys = ("--public-key", key) if key else ()
        return opal("verify", results, "--model", exact_model, *CPU, "--all", *keys, *arguments, cwd=folder)

    return run


def faults(out, folder):
    public = PublicKeys([folder / "key-public.pem"])
    return [public.find_fault(record) for record in read_results(out)]


def test_signed_results_are_what_the_model_computed_and_the_key_signed(signed, verify):
    done = check(verify(signed))
    assert "The signatures of 4 of 4 records are valid" in done.stderr
    assert "4 of 4 records match the model" in done.stderr
    unchecked = check(verify(signed, key=None))
    assert "4 records are signed; their signatures were not checked: give --public-key" in unchecked.stderr
    assert "4 of 4 records have no valid signature" in last_line(verify(signed, key="other-public.pem"))
    # after a rotation both keys are good
    assert "4 of 4 records are valid" in check(verify(signed, "--public-key", "other-public.pem")).stderr


def last_line(done, code=4):
    assert done.returncode == code, done.stderr
    return done.stderr.splitlines()[-1]


CHANGED = "changed after it was signed"


def change(**fields):
    return lambda record: {**record, **fields}


def resign(**fields):
    return lambda record: {**record, "signature": {**record["signature"], **fields}}


def without(key):
    return lambda record: {name: value for name, value in record.items() if name != key}


# what was done to a record, and how the line that names it goes on
TAMPERED = {
    "predicted label": (lambda r: {**r, "prediction": {**r["prediction"], "label": "oak"}},
                        f"{CHANGED}; prediction.label is recorded as 'oak'"),
    "score": (lambda r: {**r, "evidence": [{**r["evidence"][0], "score": 0.5}, *r["evidence"][1:]]},
              f"{CHANGED}; evidence[0].score is recorded as 0.5"),
    "digest of the model": (change(model_sha256="0" * 64), f"{CHANGED}; made by another model"),
    "label, which no model computes": (change(label="birch"), CHANGED),
    "a new field": (change(note=1), CHANGED),
    "time": (resign(time="2020-01-01T00:00:00+00:00"), CHANGED),
    "key": (resign(key="0" * 64), "signed with another key, 0000"),
    "algorithm": (resign(algorithm="none"), "signed with 'none'; expected ed25519"),
    "signature": (without("signature"), "it is not signed"),
    "answer": (without("prediction"), "not a complete record"),
}  # fmt: skip


def test_every_change_is_found_and_named(signed, verify, exact_model, exact_session, folder, monkeypatch):
    monkeypatch.chdir(folder)
    first, second, *_ = read_results(signed)
    records = [tamper(first) for tamper, _ in TAMPERED.values()]
    # a signature of another record of the run
    records.append({**first, "signature": second["signature"]})
    path = folder / "tampered.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (*records, first)))
    check = CheckOptions(compute_sha256(exact_model), public_keys=PublicKeys([folder / "key-public.pem"]))
    findings = {finding.line: str(finding) for finding in verify_records(path, exact_session, check).findings}
    expected = [*(words for _, words in TAMPERED.values()), CHANGED]
    for line, words in enumerate(expected, 1):
        name = None if "complete" in words else first["image"]
        assert findings.pop(line).startswith(f"line {line}, {name}: {words}")
    assert not findings
    # also where no record is computed again
    assert len(verify_records(path, exact_session, check, frozenset()).findings) == len(expected)
    done = verify(path)
    assert done.returncode == 4
    assert "records have no valid signature" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("--shards", "2"), ("--explain", "--sheets", "--format", "parquet")])
def test_every_way_of_running_signs_its_records(infer, folder, arguments):
    out = "-".join(arguments).replace("/", "of")
    infer(out, *arguments)
    assert set(faults(folder / out, folder)) == {""}


@pytest.mark.timeout(120)
def test_a_killed_run_continues_with_the_same_key_only(opal, exact_model, make_pictures, folder, tmp_path):
    make_pictures(tmp_path / "pictures", 60)
    infer = Infer(tmp_path, exact_model, tmp_path / "pictures")
    sign = ("--sign", str(folder / "key.pem"))
    process = infer.start("out", *sign)
    infer.wait_for("out", 10, process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = read_results_so_far(tmp_path / "out")
    assert 0 < len(before) < 60
    for other in ((), ("--sign", str(folder / "other.pem"))):
        done = infer("out", *other)
        assert re.search(r"it holds another run: --sign [0-9a-f]+\.* there, ", one_line(done))
    check(infer("out", *sign))
    records = read_results(tmp_path / "out")
    assert (len(records), records[: len(before)]) == (60, before)
    assert set(faults(tmp_path / "out", folder)) == {""}
    run = (tmp_path / "out/run.json").read_text()
    assert json.loads(run)["run"]["sign"] == records[0]["signature"]["key"]
    secret = (folder / "key.pem").read_text().splitlines()[1]
    for path in (tmp_path / "out").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes()


def read_results_so_far(out):
    lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def test_signatures_change_nothing_else(opal, infer, signed, folder):
    infer("unsigned", "--format", "csv", "--labels", "folders", key=None)
    plain = folder / "unsigned"
    assert [without("signature")(record) for record in read_results(signed)] == read_results(plain)
    assert (signed / "results.csv").read_bytes() == (plain / "results.csv").read_bytes()
    check(opal("diff", plain, signed, "--fail-on", "any"))
    both = [check(opal("convert", out, "--to", "coco")).stdout for out in (plain, signed)]
    assert both[0] == both[1]


def test_a_bad_key_or_a_missing_package_is_refused_before_anything_is_read(opal, exact_model, folder):
    infer = ("infer", folder / "in", "--model", folder / "none.onnx", "--sign")
    assert "a public key found" in one_line(opal(*infer, folder / "key-public.pem"))
    blocked = one_line(opal(*infer, folder / "key.pem", blocked=("cryptography",)))
    assert "--sign needs cryptography, which is not installed: pip install 'opal-deploy[sign]'" in blocked
    assert "only for results" in one_line(opal("verify", exact_model, "--public-key", folder / "key-public.pem"))
    serve = opal("serve", exact_model, "--sign", folder / "key-public.pem", "--port", "0")
    assert "a public key found" in one_line(serve)


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
def test_the_script_of_the_page_checks_signatures_without_python(signed, folder, tmp_path):
    (script,) = re.findall(r"```js\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    shutil.copy(folder / "key-public.pem", tmp_path / "public.pem")
    (tmp_path / "out").mkdir()
    lines = (signed / "results.jsonl").read_text("utf-8")
    changed = lines.splitlines()[0].replace('"image_index":0', '"image_index":1')
    (tmp_path / "out/results.jsonl").write_text(lines + changed)
    (tmp_path / "check.js").write_text(script)
    done = subprocess.run([NODE, "check.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["true"] * 4 + ["false"]
