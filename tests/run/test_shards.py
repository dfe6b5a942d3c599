"""A run of several shards writes the files of one process, whatever dies, and leaves no process behind."""

import os
import shutil
import signal

import psutil
import pytest

from opal_deploy.errors import UsageError
from opal_deploy.run.options import InferOptions
from opal_deploy.run.setup import plan_shards
from tests.builders import build_checkpoint, export_onnx
from tests.cli.calls import check, read_results
from tests.runs import KILLER, SLOWER, Infer, make_killer

IMAGES = 40
DRAWINGS = ("--explain", "--format", "csv")
# three times the images, and drawings: more than a process does before it waits
MANY = ("in", "in", "--explain")


@pytest.fixture(scope="module")
def images(tmp_path_factory, make_pictures):
    """Images, one of them broken."""
    folder = tmp_path_factory.mktemp("images")
    make_pictures(folder, IMAGES)[7].write_bytes(b"no")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export_onnx(build_checkpoint(), tmp_path_factory.mktemp("model") / "tiny.onnx").path


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, opal, model, images):
    """Runs of one process, in folders named after their options."""
    infer = Infer(tmp_path_factory.mktemp("one"), model, images)
    for options in ((), DRAWINGS, MANY):
        check(opal("infer", *infer.fixed, "--out", "".join(options) or "plain", *options, cwd=infer.cwd), 3)
    return infer


@pytest.fixture
def infer(tmp_path, model, images):
    infer = Infer(tmp_path, model, images)
    yield infer
    infer.end()


@pytest.fixture
def start_slowly(infer):
    """Starts two shards that wait after some records, which are written when it returns, until `SLOW` is removed."""
    modules, slow = infer.cwd / "modules", infer.cwd / "slow"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(SLOWER)
    slow.touch()
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(*arguments):
        process = infer.start("out", "--no-isolate", "--shards", "2", *arguments, PYTHONPATH=path, SLOW=str(slow))
        for number in (1, 2):
            infer.wait_for(f"out/shards/{number}-of-2", 4, process)
        return process, psutil.Process(process.pid).children(recursive=True), slow.unlink

    return start


def test_two_shards_write_the_files_of_one_process(infer, one_process):
    check(infer("out", *DRAWINGS, "--shards", "2"), 3)
    assert infer.files("out") == one_process.files("".join(DRAWINGS))
    page = (infer.cwd / "out/report.html").read_text()
    assert page.count('"slots":') + page.count('{"message":') == IMAGES
    summary, expected = infer.summary("out"), one_process.summary("".join(DRAWINGS))
    assert summary["shards"] == 2
    for key in ("statuses", "errors", "classes", "drawing_errors", "results_bytes"):
        assert summary[key] == expected[key], key


@pytest.mark.parametrize("done", [(2,), (1, 2)])
def test_shards_run_by_hand_are_joined_and_missing_ones_run(infer, one_process, done):
    for number in done:
        check(infer("out", "--explain", "--shard", f"{number}/2"), 3 if number == 1 else 0)
    drawn = {path.stat().st_ino for path in infer.cwd.glob("out/shards/2-of-2/overlays/*")}
    check(infer("out", *DRAWINGS, "--shards", "2"), 3)
    assert infer.files("out") == one_process.files("".join(DRAWINGS))
    # moved, not drawn again
    assert len(drawn) == IMAGES // 2
    assert drawn <= {path.stat().st_ino for path in infer.cwd.glob("out/overlays/*")}


@pytest.mark.parametrize(("end", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130)])
def test_a_run_that_was_ended_leaves_no_process_and_resumes(infer, one_process, start_slowly, end, code):
    process, shards, hurry = start_slowly(*MANY)
    process.send_signal(end)
    if end != signal.SIGKILL:
        assert any("interrupt again" in line for line in process.stderr)
    hurry()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert len(shards) == 2
    assert not psutil.wait_procs(shards, timeout=30)[1]
    if end != signal.SIGKILL:
        assert "the same command resumes" in stderr
        assert infer.summary("out")["complete"] is False
    written = [(infer.cwd / f"out/shards/{number}-of-2/results.jsonl").read_bytes() for number in (1, 2)]
    assert all(b"\n" in records for records in written)
    check(infer("out", *MANY, "--shards", "2"), 3)
    assert infer.files("out") == one_process.files("".join(MANY))


def test_images_that_kill_their_process_get_error_records_and_the_rest_goes_on(infer, one_process, images, monkeypatch):
    (infer.cwd / "modules").mkdir()
    (infer.cwd / "modules/sitecustomize.py").write_text(KILLER)
    monkeypatch.setenv("PYTHONPATH", str(infer.cwd / "modules"), prepend=os.pathsep)
    (infer.cwd / "in").unlink()
    shutil.copytree(images, infer.cwd / "in")
    for number in (21, 22):
        make_killer(infer.cwd / f"in/{number:03}.png")
    assert "SIGKILL; it is started again" in check(infer("out", "--no-isolate", "--shards", "2"), 3).stderr
    records, expected = read_results(infer.cwd / "out"), read_results(one_process.cwd / "plain")
    assert [(record["error"]["code"], record["image_index"]) for record in records[21:23]] == [
        ("worker_died", 21), ("worker_died", 22),
    ]  # fmt: skip
    assert records[:21] + records[23:] == expected[:21] + expected[23:]


@pytest.mark.parametrize("options", [("--model", "other.onnx"), ("in",)])
def test_shards_of_another_run_are_refused(infer, exact_model, options):
    (infer.cwd / "other.onnx").symlink_to(exact_model)
    check(infer("out", "--shard", "2/2", *options), 0 if options != ("in",) else 3)
    before = infer.files("out")
    assert "it holds another run" in check(infer("out", "--shards", "2"), 2).stderr.splitlines()[-1]
    assert infer.files("out") == before


def test_too_many_errors_in_all_shards_stop_the_run(infer):
    assert "--max-errors 0" in check(infer("out", "--max-errors", "0", "--shards", "2"), 5).stderr


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({}, None),
        ({"shards": 1, "device": "0,1"}, None),
        ({"device": "0,1,2"}, ("cuda:0", "cuda:1", "cuda:2")),
        ({"device": "0,1,2", "shards": 2}, ("cuda:0", "cuda:1")),
        ({"device": "0,1", "shards": 3}, ("cuda:0", "cuda:1", "cuda:0")),
        ({"device": "cpu", "shards": 2}, ("cpu", "cpu")),
        ({"device": "0,1", "shard": "1/2"}, None),
    ],
)
def test_each_shard_has_a_device(options, devices):
    assert plan_shards(["in"], InferOptions(**options), model_is_open=False) == devices


def test_a_list_on_standard_input_has_one_reader():
    assert plan_shards(["-"], InferOptions(device="0,1"), model_is_open=False) is None
    for options in ({"shards": 2}, {"shard": "1/2"}, {"ray": "auto"}):
        with pytest.raises(UsageError, match="@FILE"):
            plan_shards(["-"], InferOptions(**options), model_is_open=False)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"shard": "1/2", "shards": 2}, "--shard 1/2"),
        ({"shard": "1/2", "sign": "key.pem"}, "--sign"),
        ({"shards": 2}, "model"),
        ({"ray_cpus": 2}, "without --ray"),
        ({"ray": "auto", "device": "cpu"}, "--device cpu"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, word):
    with pytest.raises(UsageError, match=word):
        plan_shards(["in"], InferOptions(**options), model_is_open=True)
