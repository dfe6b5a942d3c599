"""A results.jsonl against its signed run.json: records that were removed, repeated, moved or replaced."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from opal_deploy import verify
from opal_deploy.auditing.verify_records import verify_signatures
from opal_deploy.records.build import error_record
from opal_deploy.records.lines import to_json_line
from opal_deploy.records.signatures import PublicKeys, Signer
from opal_deploy.run.directory import inspect_run_dir
from opal_deploy.run.summary import Summary
from tests.records.test_signatures import write

COUNT = 12


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    key = ed25519.Ed25519PrivateKey.generate()
    write(folder / "key.pem", key)
    write(folder / "public.pem", key, public=True)
    return Signer(folder / "key.pem", print), PublicKeys([folder / "public.pem"]), folder / "public.pem"


@pytest.fixture
def run(signer, tmp_path):
    """Write a signed run of records at these positions; return its directory."""

    def write_run(positions=range(COUNT), shard=None, complete=True):
        directory = inspect_run_dir(tmp_path, {"shard": shard})
        directory.write_config()
        summary, lines = Summary(), []
        for position in positions:
            unsigned = error_record(f"{position}.png", "not_an_image", "", image_index=position)
            record = signer[0].sign(unsigned, directory.document["id"])
            summary.count(record)
            lines.append(to_json_line(record))
        (tmp_path / "results.jsonl").write_bytes(b"".join(lines))
        directory.sign_config(summary, signer[0], complete=complete)
        return tmp_path

    return write_run


@pytest.fixture
def check(signer):
    return lambda out, name="results.jsonl": verify_signatures(out / name, signer[1])


def edit(out, change):
    lines = (out / "results.jsonl").read_text().splitlines(keepends=True)
    change(lines)
    (out / "results.jsonl").write_text("".join(lines))


@pytest.mark.parametrize(
    ("positions", "shard", "complete", "note"),
    [
        (range(COUNT), None, True, "12 images were answered, 12 records are here"),
        (range(COUNT, 2 * COUNT), "2/3", True, "12 images were answered, 12 records are here"),
        (range(5), None, False, "5 images were answered before the run stopped early, 5 records are here"),
    ],
)
def test_a_run_as_it_was_written_has_no_fault(run, check, positions, shard, complete, note):
    report = check(run(positions, shard, complete))
    assert (report.run_faults, report.signatures_bad, report.findings) == ([], 0, [])
    assert report.run_notes == ["The signature of run.json is valid", note]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines: lines.__delitem__(slice(7, 9)), "12 images were answered, 10 records are here; missing: 7-8"),
        (lambda lines: lines.insert(3, lines[3]), "12 images were answered, 13 records are here; repeated: 3"),
        (lambda lines: lines.__setitem__(7, lines[3]), "12 records are here; missing: 7; repeated: 3 (image_index)"),
        (lambda lines: lines.reverse(), "the records are not those that the run wrote, or in another order"),
    ],
)  # fmt: skip
def test_what_happened_to_the_records_is_told(run, check, change, fault):
    out = run()
    edit(out, change)
    report = check(out)
    assert report.signatures_bad == 0
    assert fault in ", ".join(report.run_faults)


def test_without_its_signed_run_a_signed_record_is_not_enough(run, check):
    out = run()
    document = json.loads((out / "run.json").read_text())
    document["records"]["count"] = 11
    (out / "run.json").write_text(json.dumps(document))
    assert "run.json: changed after it was signed" in ", ".join(check(out).run_faults)
    (out / "run.json").unlink()
    assert "run.json: it is missing or damaged" in ", ".join(check(out).run_faults)
    # an extract that is handed over alone
    (out / "results.jsonl").rename(out / "one.jsonl")
    assert check(out, "one.jsonl").run_faults == []


def test_the_run_json_of_another_run_is_refused(run, check, tmp_path):
    out = run()
    other = (out / "run.json").read_bytes()
    for name in ("run.json", "results.jsonl"):
        (out / name).unlink()
    run()
    (out / "run.json").write_bytes(other)
    assert "run.json: some records are of another run" in ", ".join(check(out).run_faults)


def test_an_earlier_state_of_a_run_is_refused_unless_asked_for(run, signer):
    out = run(range(5), complete=False)
    options = {"public_key": (signer[2],), "log": print}
    assert "stopped early" in verify(out, **options).failure
    assert not verify(out, allow_incomplete=True, **options).failure
