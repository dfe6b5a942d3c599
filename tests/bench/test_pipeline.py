"""`bench pipeline`: its cases, sessions, decoders and disks of known slowness, and its command from end to end."""

import itertools
import pkgutil
import time

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.measurement import Measurement, read_measurements
from opal_deploy.bench.monitor import Monitor
from opal_deploy.bench.options import PipelineOptions, parse_counts
from opal_deploy.bench.pipeline import ReplaySession, decode_images, measure_pipeline
from opal_deploy.errors import UsageError
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.sources.image import InputImage
from tests.cli.calls import check, one_line


class SleepingSession:
    """Takes so many seconds a batch, and keeps so many megabytes of each."""

    device, description = "cpu", "sleeping on CPU"

    def __init__(self, seconds=0.0, *, leaks=0):
        self.metadata = Metadata(("a", "b"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32))
        self.seconds, self.leaks = seconds, leaks
        self.kept = []

    def run(self, images):
        time.sleep(self.seconds)
        self.kept.append(bytearray(b"x" * (self.leaks << 20)))
        count = len(images)
        scores = np.full((count, 4), 0.5, np.float32)
        return Outputs(np.full((count, 2), -0.5, np.float32), np.zeros((count, 4), np.int32), scores)


@pytest.fixture
def items(tmp_path, make_pictures):
    return [InputImage.at(path) for path in make_pictures(tmp_path / "pictures", 12)]


def test_counts_are_parsed():
    assert parse_counts("--batch", "8, 1,32,8") == (1, 8, 32)
    for text in ("", "0", "1,,2", "a", "-1", "1.5", "1;2", "1,0", "²"):
        with pytest.raises(UsageError, match=r"--batch .* expected positive integers"):
            parse_counts("--batch", text)


def test_whole_batches_of_usable_images_are_decoded_but_not_of_all(items):
    items[1].source.write_bytes(b"no image")
    assert decode_images(items, (32, 48), 5).shape == (10, 32, 48, 3)
    assert decode_images(items * 100, (8, 8), 500).shape == (1000, 8, 8, 3)
    with pytest.raises(UsageError, match=r"11 usable images for a batch of 12; give more, or a smaller --batch"):
        decode_images(items, (32, 32), 12)


def measure(session, items, log=lambda _: None, **options):
    more = {name: options.pop(name) for name in ("device", "progress", "interval") if name in options}
    chosen = PipelineOptions(**{"repeats": 1, "batch": 2, "workers": 1, "isolate": False, **options})
    return measure_pipeline(session, items, chosen, log, **more)


def test_everything_is_measured_once_a_repeat_on_the_usable_images(items):
    items[3].source.write_bytes(b"")
    lines = []
    done = []
    result = measure(SleepingSession(), items, lines.append, repeats=3, progress=lambda *counts: done.append(counts))
    # infer with and without overlays, and the session alone
    assert done == [(count, 9) for count in range(10)]
    assert (len(result.bare), [len(variant.passes) for variant in result.variants]) == (3, [3, 3])
    assert [line.split(":")[0] for line in lines] == ["repeat 1 of 3", "repeat 2 of 3", "repeat 3 of 3"]
    assert (result.images, result.given) == (11, 12)
    assert {one.images for one in result.variants[0].passes} == {11}
    # whole batches only
    assert {one.images for one in result.bare} == {10}


def test_a_pipelined_session_is_measured_with_its_batches_in_flight_and_its_copies_apart(items, pipelined, monkeypatch):
    class Gpu:
        name = "cuda:0"

        def sample(self):
            return {"utilisation_percent": 91.0}

        def finish(self):
            return {}, ()

    monkeypatch.setattr("opal_deploy.bench.pipeline.monitor_devices", lambda _: Monitor([Gpu()]))
    _, session = pipelined
    result = measure(session, items, device="cuda:0 a GPU", explain=False)
    assert [variant.name for variant in result.variants] == ["infer"]
    # the bare session and `infer` alike
    assert (max(session.waits), session.alone, session.locked, session.in_flight) == (3, 0, {}, [])
    # one batch and three of warm-up, six of the bare session, and those of `infer`
    assert session.from_locked == 1 + 3 + 6 + 6
    assert [one.gpu_use for one in result.variants[0].passes] == [91]
    figures = {name: figure.value for name, figure in result.stages.items()}
    assert figures == {"host_to_device_ms": 2, "compute_ms": 3, "device_to_host_ms": 1}


@pytest.mark.parametrize(
    ("slow", "role", "stage", "reason"),
    [
        ("", "session", "compute", "session"),
        ("opal_deploy.predict.prepare.decode_for_input", "decoders", "decode", "images"),
        ("opal_deploy.predict.prepare.open_file", "decoders", "read", "images"),
        ("opal_deploy.run.results.RecordWriter.write", "loop", "write", "disk"),
        ("opal_deploy.run.draw_pool.draw_overlay", "drawers", "draw", "drawing"),
    ],
    ids=["session", "decoding", "reading", "writing", "drawing"],
)
def test_a_slow_stage_is_the_bottleneck(items, monkeypatch, slow, role, stage, reason):
    # on a busy machine the busiest threads still stand out, but may have to wait more than usual
    monkeypatch.setattr("opal_deploy.bench.bottleneck.BUSY", 0.0)
    if slow:
        function = pkgutil.resolve_name(slow)
        monkeypatch.setattr(slow, lambda *args, **options: (time.sleep(0.05), function(*args, **options))[1])
    plain, explained = measure(SleepingSession(0.01 if slow else 0.1), items).variants
    # overlays are drawn with --explain alone
    bottleneck = (explained if stage == "draw" else plain).bottleneck
    assert (bottleneck.role, bottleneck.stage) == (role, stage)
    assert max(bottleneck.loop_waited_for, key=lambda name: bottleneck.loop_waited_for[name]) == reason
    assert (plain.bottleneck.role == role) is (stage != "draw")


@pytest.mark.parametrize("leaks", [10, 0])
def test_a_leaking_session_is_found_by_the_memory_curve(items, leaks):
    many = list(itertools.islice(itertools.cycle(items), 60))
    first, second = measure(SleepingSession(0.01, leaks=leaks), many, interval=0.01).variants
    # judged, not merely too short to be judged
    assert first.memory.rise is not None
    assert first.memory.grows is bool(leaks)
    assert second.memory.grows in (False, bool(leaks))


def test_a_model_without_anchors_has_no_overlays_to_measure(linear_model, items):
    result = measure(OnnxSession(linear_model, threads=1), items)
    assert [variant.name for variant in result.variants] == ["infer"]


def test_replayed_outputs_are_the_networks_in_order(exact_session):
    images = np.random.default_rng(0).integers(0, 255, (3, 96, 96, 3), np.uint8)
    replay = ReplaySession.record(exact_session, [images[:2], images[2:]])
    replayed = Outputs.concatenate([replay.run(images[:2]), replay.run(images[:2])])
    expected = Outputs.concatenate([exact_session.run(images[:2]), exact_session.run(images[2:])])
    for name in ("logits", "argmax"):
        assert getattr(replayed, name).tolist() == getattr(expected, name)[[0, 1, 2, 0]].tolist()
    with pytest.raises(ValueError, match="a batch of 4, but only 3 outputs"):
        replay.run(np.zeros((4, 96, 96, 3), np.uint8))


def test_the_network_can_be_left_out(items):
    session = SleepingSession()
    result = measure(session, items, network=False)
    assert result.bare == ()
    # asked once for answers to repeat, never while the pipeline runs
    assert len(session.kept) == 6
    compute = result.variants[0].passes[0].times.sum_stage("compute")
    assert compute.calls == 6
    assert result.session.startswith("no network: outputs precomputed by sleeping")


@pytest.fixture
def bench(opal, exact_model, items):
    def run(*arguments, model=exact_model):
        folder = items[0].source.parent
        options = ["--repeats", "2", "--threads", "1", "--json", *arguments]
        return opal("bench", "pipeline", folder, "--model", model, *options)

    return run


def test_the_command_reports_to_people_and_machines(bench, exact_model, tmp_path):
    out = tmp_path / "pipeline.jsonl"
    done = check(bench("--batch", "4", "--workers", "1", "--out", out))
    measurement = Measurement.from_line(done.stdout)
    figures, target = measurement.figures, measurement.target
    assert list(read_measurements([out])) == [measurement]
    assert measurement.kind == "pipeline"
    assert measurement.case == {
        "images": 12, "batch": 4, "workers": 1, "threads": 1, "network": True, "decode": "default", "isolate": True,
    }  # fmt: skip
    assert (target.name, target.runtime, target.head) == (exact_model.name, "onnxruntime", "opal")
    assert measurement.command.startswith("opal-deploy bench pipeline pictures --model exact.onnx")
    for name in ("bare", "infer", "infer_explain"):
        assert (figures[name].unit, len(figures[name].repeats)) == ("images/s", 2)
    ratios = [a / b for a, b in zip(figures["infer"].repeats, figures["bare"].repeats, strict=True)]
    assert figures["infer_share"].repeats == pytest.approx(ratios)
    stages = {name.split(".")[1] for name in figures if name.endswith(".wall")}
    # on the CPU nothing is copied to a device
    assert stages == {"read", "decode", "resize", "compute", "evidence", "draw", "write"}
    assert 2 <= len(measurement.details["memory"]["infer"]["megabytes"]) <= 60
    assert "\ninfer                        " in done.stderr
    assert all(note in done.stderr for note in measurement.details["notes"])


def test_a_checkpoint_is_measured_without_the_network(bench, exact_model):
    done = check(bench("--batch", "4", "--workers", "1", "--no-network", model=exact_model.with_suffix(".pt")))
    measurement = Measurement.from_line(done.stdout)
    # a checkpoint runs as `infer` runs it
    assert (measurement.target.runtime, measurement.target.device) == ("torch eager", "cpu")
    assert measurement.target.layout == "uint8 NHWC, normalised on the device; convolutions NCHW"
    assert (measurement.case["network"], measurement.case["threads"]) == (False, 1)
    assert not {"bare", "infer_share", "bare.cpu"} & measurement.figures.keys()
    assert {"infer", "infer_explain"} <= measurement.figures.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runtime", "torch"], "an ONNX file, and --runtime torch runs a checkpoint"),
        (["--cuda-graphs"], "--cuda-graphs applies only to engines"),
        (["--batch", "99"], "12 usable images for a batch of 99"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(bench, arguments, message):
    assert message in one_line(bench(*arguments))
