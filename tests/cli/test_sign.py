"""`infer --sign` and `verify --public-key`: every record of a run is signed, and no change of one goes unnoticed."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from opal_deploy.records.signatures import PublicKeys
from tests.cli.calls import check, one_line, read_results
from tests.records.test_signatures import write

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
        fixed = ("infer", "in", "--model", exact_model, "--no-isolate", *CPU, "--out", out)
        return check(opal(*fixed, *signs, *arguments, cwd=folder), code)

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
    assert "4 of 4 records have no valid signature" in check(verify(signed, key="other-public.pem"), 4).stderr
    # after a rotation both keys are good
    assert "4 of 4 records are valid" in check(verify(signed, "--public-key", "other-public.pem")).stderr


@pytest.mark.parametrize("arguments", [("--shards", "2"), ("--explain", "--format", "parquet")])
def test_every_way_of_running_signs_its_records(infer, folder, arguments):
    out = "-".join(arguments).replace("/", "of")
    infer(out, *arguments)
    assert set(faults(folder / out, folder)) == {""}


def test_a_run_that_ended_early_continues_with_the_same_key_only(infer, folder):
    # one image is broken
    infer("early", "--max-errors", "0", "--batch", "1", code=5)
    for other in (None, "other.pem"):
        assert "it holds another run: --sign " in one_line(infer("early", key=other, code=2))
    infer("early")
    assert faults(folder / "early", folder) == [""] * 4
    run = json.loads((folder / "early/run.json").read_text())
    assert run["run"]["sign"] == read_results(folder / "early")[0]["signature"]["key"]
    secret = (folder / "key.pem").read_bytes().splitlines()[1]
    assert all(secret not in path.read_bytes() for path in (folder / "early").rglob("*") if path.is_file())


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
