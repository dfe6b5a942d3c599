"""`infer --processes` writes the files of one process, whatever dies, and leaves no process behind."""

import functools
import os
import shutil
import signal

import psutil
import pytest

from opal_deploy.errors import UsageError
from opal_deploy.parallel.backend import plan_processes
from opal_deploy.run.options import InferOptions
from tests.builders import build_checkpoint, export_onnx
from tests.cli.calls import one_line, read_results
from tests.runs import KILLER, SLOWER, Infer, make_killer

IMAGES = 40


@pytest.fixture(scope="module")
def images(tmp_path_factory, make_pictures):
    """Images, one of them broken."""
    folder = tmp_path_factory.mktemp("images")
    make_pictures(folder, IMAGES)[7].write_bytes(b"no")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.onnx"
    export_onnx(build_checkpoint(), path)
    return path


@pytest.fixture
def infer(tmp_path, model, images):
    infer = Infer(tmp_path, model, images)
    yield infer
    infer.end()


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, opal, model, images):
    """Return the folder of a run in this process; the same options run once."""
    infer = Infer(tmp_path_factory.mktemp("one"), model, images)

    @functools.cache
    def run(*options):
        out = "-".join(["out", *map(os.path.basename, options)])
        done = opal("infer", *infer.fixed, "--out", out, *options, cwd=infer.cwd)
        assert done.returncode in (0, 3), done.stderr
        return infer.cwd / out

    return run


@pytest.mark.data
def test_photographs_get_the_files_of_one_process(infer, one_process, photographs):
    (infer.cwd / "list.txt").write_text("\n".join(map(str, photographs[:8])))
    options = (f"@{infer.cwd}/list.txt", "--explain", "--sheets", "--format", "csv", "--shard", "1/3")
    two = infer("two", *options, "--processes", "2")
    assert two.returncode == 0, two.stderr
    assert infer.files("two") == infer.files(one_process(*options))
    assert (infer.cwd / "two/report.html").read_text().count("<article") == 16
    summary = infer.summary("two")
    assert summary["processes"] == {"count": 2, "lost": 0, "chunks_retried": 0}
    stages = {row["stage"]: row["calls"] for row in summary["time"]["stages"]}
    assert stages["decode"] == 16


@pytest.fixture
def start_slowly(infer):
    """Return a function that starts a run in two slow workers and waits for a record; another lets them be fast."""
    modules, slow = infer.cwd / "modules", infer.cwd / "slow"
    modules.mkdir()
    (modules / "sitecustomize.py").write_text(SLOWER)
    slow.touch()
    path = os.pathsep.join([str(modules), *filter(None, [os.environ.get("PYTHONPATH")])])

    def start(out, *arguments):
        process = infer.start(out, "--no-isolate", "--processes", "2", *arguments, PYTHONPATH=path, SLOW=str(slow))
        infer.wait_for(out, 1, process)
        return process

    return start, slow.unlink


def test_a_worker_that_is_killed_costs_no_record(infer, one_process, start_slowly):
    start, hurry = start_slowly
    # three times the images: more than both workers do before they wait
    options = ("in", "in", "--explain")
    process = start("two", *options)
    psutil.Process(process.pid).children()[0].kill()
    hurry()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 3, stderr
    assert "A worker process was ended by SIGKILL; its " in stderr
    assert infer.files("two") == infer.files(one_process(*options))
    assert infer.summary("two")["processes"]["lost"] == 1


def test_an_image_that_kills_its_worker_gets_a_record_and_the_others_their_answers(
    infer, one_process, images, monkeypatch
):
    (infer.cwd / "modules").mkdir()
    (infer.cwd / "modules/sitecustomize.py").write_text(KILLER)
    monkeypatch.setenv("PYTHONPATH", str(infer.cwd / "modules"), prepend=os.pathsep)
    (infer.cwd / "in").unlink()
    shutil.copytree(images, infer.cwd / "in")
    make_killer(infer.cwd / "in/021.png")
    done = infer("two", "--no-isolate", "--processes", "2")
    assert done.returncode == 3, done.stderr
    records, expected = read_results(infer.cwd / "two"), read_results(one_process())
    assert (records[21]["error"]["code"], records[21]["image_index"]) == ("worker_died", 21)
    assert records[:21] + records[22:] == expected[:21] + expected[22:]
    # its chunk of 8 twice, then 4, 2 and 1
    assert infer.summary("two")["processes"]["lost"] == 5


@pytest.mark.parametrize(
    ("end", "options", "then"),
    [
        (signal.SIGKILL, ("--explain",), "3"),
        # six times the images: more than are read ahead of a slow chunk
        (signal.SIGINT, ("in",) * 5, "1"),
    ],
)
def test_a_run_that_was_ended_leaves_no_process_and_goes_on_with_another_number(
    infer, one_process, start_slowly, end, options, then
):
    start, hurry = start_slowly
    process = start("out", *options)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(end)
    hurry()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == (-end if end is signal.SIGKILL else 130), stderr
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    done = infer("out", *options, "--processes", then)
    assert done.returncode == 3, done.stderr
    assert " records are there already" in done.stderr
    assert infer.files("out") == infer.files(one_process(*options))


def test_a_model_that_cannot_be_opened_is_one_line_and_the_earlier_run_stays(infer, one_process, model):
    shutil.copytree(one_process(), infer.cwd / "out")
    before = infer.files("out")
    data = bytearray(model.read_bytes())
    data[len(data) // 2] ^= 1
    (infer.cwd / "damaged.onnx").write_bytes(data)
    assert "damaged.onnx" in one_line(infer("out", "--overwrite", "--processes", "2", "--model", "damaged.onnx"))
    assert infer.files("out") == before


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({}, None),
        ({"processes": 1, "device": "0,1"}, None),
        ({"device": "0,1,2"}, ("cuda:0", "cuda:1", "cuda:2")),
        ({"device": "0,1,2", "processes": 2}, ("0,2", "cuda:1")),
        ({"device": "0,1", "processes": 3}, ("cuda:0", "cuda:1", "cuda:0")),
        ({"device": "cpu", "processes": 2}, ("cpu", "cpu")),
        ({"device": "0,1", "every": "1s"}, None),
    ],
)
def test_each_process_has_its_devices(options, devices):
    plan = plan_processes(InferOptions(**options), model_is_open=False)
    assert (None if plan is None else plan.devices) == devices


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ray": "local"}, "with --ray: its actors are processes already; leave out --processes"),
        ({"every": "1s"}, "with --every: videos are decoded in one process"),
        ({}, "with an open model: give the path of the model file"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, says):
    with pytest.raises(UsageError, match=f"^--processes 2 {says}"):
        plan_processes(InferOptions(processes=2, **options), model_is_open=True)
