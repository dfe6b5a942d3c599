"""`infer --sheets` and `--slot-names`: what they add, what they refuse, and how they go on."""

import json
import shutil

import pytest

from tests.cli.calls import check, read_results

IMAGES, BROKEN = 8, 3


def files(root):
    """Return the files of a run, but for those that name times."""
    left_out = {"run.json", "summary.json", ".lock"}
    paths = (path for path in root.rglob("*") if path.is_file() and path.name not in left_out)
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def place(tmp_path_factory, make_pictures, opal, exact_model):
    """Images in `in`, one of them broken, and runs in `plain` and `sheets`."""
    cwd = tmp_path_factory.mktemp("place")
    make_pictures(cwd / "in", IMAGES)
    (cwd / "in" / f"{BROKEN:03}.png").write_bytes(b"no")
    for call in ("infer in/ --out plain", "infer in/ --out sheets --sheets --json"):
        assert opal(*call.split(), "--model", exact_model, "--threads", "1", "--no-isolate", cwd=cwd).returncode == 3
    return cwd


@pytest.fixture
def out(place, tmp_path):
    """The folder of the next run, beside these images."""
    (tmp_path / "in").symlink_to(place / "in")
    return tmp_path / "out"


@pytest.fixture
def infer(opal, exact_model, out):
    def run(*arguments, model=exact_model, command="infer", code=3):
        decoded = ("--no-isolate",) if command == "infer" else ()
        call = [command, "in/", "--model", model, "--threads", "1", *decoded, "--out", out.name, *arguments]
        return check(opal(*call, cwd=out.parent), code)

    return run


@pytest.fixture
def begun(place, out):
    """The run with sheets, as if it had ended before its summary."""
    shutil.copytree(place / "sheets", out)
    (out / "summary.json").unlink()
    return out


def test_sheets_are_those_of_explain_and_a_run_without_them_shows_no_trace(infer, out, place):
    infer("--out", "e", command="explain")
    expected = files(out.with_name("e"))
    assert len(expected) == IMAGES - 1
    assert files(place / "sheets/sheets") == expected
    found = read_results(place / "sheets")
    names = [record.pop("sheet", None) for record in found]
    assert names == [None if n == BROKEN else f"sheets/{n:06}-{n:03}.png" for n in range(IMAGES)]
    assert found == read_results(place / "plain")
    assert {name.partition("/")[0] for name in files(place / "sheets")} == {"results.jsonl", "sheets"}
    assert set(files(place / "plain")) == {"results.jsonl"}
    assert {"sheets", "slot_names"}.isdisjoint(json.loads((place / "plain/run.json").read_text())["run"])


def test_names_alone_are_in_the_records_and_nothing_is_drawn(infer, place, out):
    labels = {record["prediction"]["label"] for record in read_results(place / "plain") if "prediction" in record}
    tables = (f"[{json.dumps(label, ensure_ascii=False)}]\n1 = 'tail'\n" for label in labels)
    out.with_name("names.toml").write_text("".join(tables), "utf-8")
    infer("--slot-names", "names.toml")
    assert set(files(out)) == {"results.jsonl"}
    for record in read_results(out):
        assert [slot.get("name") for slot in record.get("evidence", [])] in ([None, "tail", None], [])


def test_a_record_whose_sheet_was_lost_is_made_again_with_all_after_it(infer, place, begun):
    number = 4
    sheet = begun / f"sheets/{number:06}-{number:03}.png"
    sheet.unlink()
    done = infer("--sheets")
    assert f"out: {number} record" in done.stderr
    assert f"{IMAGES} images ({number} of them before)" in done.stderr
    assert files(begun) == files(place / "sheets")
    assert json.loads((begun / "summary.json").read_text())["images"] == IMAGES
