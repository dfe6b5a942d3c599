"""`bench pipeline`: its cases, sessions, decoders and disks of known slowness, and its command from end to end."""

from __future__ import annotations

import itertools
import pkgutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import opal_deploy
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench.measurement import Measurement, read_measurements
from opal_deploy.bench.monitor import Monitor
from opal_deploy.bench.options import PipelineOptions, parse_counts, parse_image_sizes
from opal_deploy.bench.pipeline.cases import Case, build_cases, decode_images, resized_copies
from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline
from opal_deploy.bench.pipeline.measure import CaseResult, measure_case
from opal_deploy.bench.pipeline.replay import ReplaySession
from opal_deploy.errors import UsageError
from opal_deploy.inference.sources.items import Item
from opal_deploy.runtime import compiled_session
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import BatchTimes, ImageBatch


class SleepingSession:
    """Takes so many seconds a batch, and keeps so many megabytes of each."""

    description = "sleeping on CPU"

    def __init__(self, seconds: float = 0.0, *, leaks: int = 0) -> None:
        self.metadata = Metadata(("a", "b"), 2, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 4), (32, 32))
        self.seconds, self.leaks = seconds, leaks
        self.kept: list[bytearray] = []

    def run(self, images: ImageBatch) -> Outputs:
        time.sleep(self.seconds)
        self.kept.append(bytearray(b"x" * (self.leaks << 20)))
        count = len(images)
        scores = np.full((count, 4), 0.5, np.float32)
        return Outputs(np.full((count, 2), -0.5, np.float32), np.zeros((count, 4), np.int32), scores)


@pytest.fixture
def items(tmp_path: Path, make_pictures: Callable) -> list[Item]:
    return [Item(path, path.name) for path in make_pictures(tmp_path / "pictures", 12)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [Case(8, 2)]),
        ({"batch": (16, 32)}, [Case(16, 2), Case(32, 2)]),
        ({"batch": (1, 8), "workers": (1, 2)}, [Case(8, 2), Case(8, 1), Case(1, 2)]),
        ({"image_size": ((50, 40),)}, [Case(8, 2, (50, 40))]),
        ({"image_size": ((50, 40), (90, 80))}, [Case(8, 2), Case(8, 2, (50, 40)), Case(8, 2, (90, 80))]),
    ],
    ids=str,
)
def test_each_value_is_varied_on_its_own_around_one_base_case(values: dict, expected: list[Case]) -> None:
    cases = build_cases(PipelineOptions(**values, isolate=False), default_workers=2)
    assert cases == expected


def test_counts_and_sizes_are_parsed() -> None:
    assert parse_counts("--batch", "8, 1,32,8") == (1, 8, 32)
    assert parse_image_sizes("250x188, 500x375") == ((250, 188), (500, 375))
    for text in ("", "0", "1,,2", "a", "-1", "1.5", "1;2", "1,0", "²"):
        with pytest.raises(UsageError, match=r"--batch .* expected positive integers"):
            parse_counts("--batch", text)
    for text in ("", "500", "500x", "0x10", "500x375x3", "500X375", "65501x10", "a,b"):
        with pytest.raises(UsageError, match=r"--image-size .* expected WIDTHxHEIGHT"):
            parse_image_sizes(text)


def test_copies_have_their_size_and_are_removed_afterwards(items: list[Item]) -> None:
    items[1].path.write_bytes(b"no image")
    with resized_copies(items, (200, 100)) as copies:
        paths = [copy.path for copy in copies]
        # a broken image stays what it is
        assert [path == item.path for path, item in zip(paths, items, strict=True)] == [False, True, *[False] * 10]
        del paths[1]
        assert len(set(paths)) == 11
        for path in paths:
            with Image.open(path) as copy:
                assert (copy.size, copy.format) == ((200, 100), "JPEG")
    assert not any(path.exists() for path in paths)
    with resized_copies(items, None) as same:
        assert same == items


def test_whole_batches_of_usable_images_are_decoded_but_not_of_all(items: list[Item]) -> None:
    items[1].path.write_bytes(b"no image")
    assert decode_images(items, (32, 48), 5).shape == (10, 32, 48, 3)
    assert decode_images(items * 100, (8, 8), 500).shape == (1000, 8, 8, 3)
    with pytest.raises(UsageError, match=r"11 usable images for a batch of 12; give more, or a smaller --batch"):
        decode_images(items, (32, 32), 12)


def measure(session: Any, items: list[Item], log: Any = lambda _: None, **options: Any) -> CaseResult:
    more = {name: options.pop(name) for name in ("device", "progress", "interval") if name in options}
    return measure_case(session, items, Case(2, 1), PipelineOptions(**{"repeats": 1, **options}), log, **more)


def test_everything_is_measured_once_a_repeat_on_the_usable_images(items: list[Item]) -> None:
    items[3].path.write_bytes(b"")
    lines: list[str] = []
    done: list[tuple[int, int]] = []
    result = measure(SleepingSession(), items, lines.append, repeats=3, progress=lambda *counts: done.append(counts))
    # infer with and without overlays, and the session alone
    assert done == [(count, 9) for count in range(10)]
    assert (len(result.bare), [len(variant.passes) for variant in result.variants]) == (3, [3, 3])
    assert [line.split(":")[0] for line in lines] == ["repeat 1 of 3", "repeat 2 of 3", "repeat 3 of 3"]
    assert (result.images, result.given) == (11, 12)
    assert {one.images for one in result.variants[0].passes} == {11}
    # whole batches only
    assert {one.images for one in result.bare} == {10}


class PipelinedSleeper(SleepingSession):
    """Takes three batches at a time, and page-locked memory."""

    depth = 3
    description = "sleeping on a GPU"

    def __init__(self) -> None:
        super().__init__()
        self.in_flight: list[ImageBatch] = []
        self.most = self.from_locked = self.alone = 0
        self.locked: dict[int, int] = {}

    def submit(self, images: ImageBatch) -> object:
        self.in_flight.append(images)
        self.most = max(self.most, len(self.in_flight))
        address = images.ctypes.data
        self.from_locked += any(start <= address < start + size for start, size in self.locked.items())
        return images

    def collect(self, handle: object) -> Outputs:
        assert self.in_flight.pop(0) is handle
        return super().run(handle)  # type: ignore[arg-type]

    def run(self, images: ImageBatch) -> Outputs:
        self.alone += 1
        return super().run(images)

    def run_staged(self, images: ImageBatch) -> tuple[Outputs, BatchTimes]:
        return super().run(images), BatchTimes(0.002, 0.003, 0.001)

    def register_buffer(self, address: int, size: int) -> bool:
        self.locked[address] = size
        return True

    def unregister_buffer(self, address: int) -> None:
        del self.locked[address]


def test_a_pipelined_session_is_measured_with_its_batches_in_flight_and_its_copies_apart(
    items: list[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        name = "cuda:0"

        def sample(self) -> dict[str, float]:
            return {"utilisation_percent": 91.0}

        def finish(self) -> tuple[dict[str, Any], tuple[str, ...]]:
            return {}, ()

    monkeypatch.setattr("opal_deploy.bench.pipeline.measure.monitor_devices", lambda _: Monitor([Gpu()]))
    session = PipelinedSleeper()
    result = measure(session, items, device="cuda:0 a GPU", explain=False)
    assert [variant.name for variant in result.variants] == ["infer"]
    # the bare session and `infer` alike
    assert (session.most, session.alone, session.locked, session.in_flight) == (3, 0, {}, [])
    # one batch and three of warm-up, six of the bare session, and those of `infer`
    assert session.from_locked == 1 + 3 + 6 + 6
    assert [one.gpu_use for one in result.variants[0].passes] == [91]
    figures = {name: figure.value for name, figure in result.stages.items()}
    assert figures == {"host_to_device_ms": 2, "compute_ms": 3, "device_to_host_ms": 1}


@pytest.mark.parametrize(
    ("slow", "role", "stage", "reason"),
    [
        ("", "session", "compute", "session"),
        ("opal_deploy.inference.decoding.prepare.decode_for_input", "decoders", "decode", "pictures"),
        ("opal_deploy.inference.decoding.prepare.open_file", "decoders", "read", "pictures"),
        ("opal_deploy.inference.run.results.RecordWriter.write", "loop", "write", "disk"),
        ("opal_deploy.inference.drawings.draw_overlay", "drawers", "draw", "drawing"),
    ],
    ids=["session", "decoding", "reading", "writing", "drawing"],
)
def test_a_slow_stage_is_the_bottleneck(
    items: list[Item], monkeypatch: pytest.MonkeyPatch, slow: str, role: str, stage: str, reason: str
) -> None:
    if slow:
        function = pkgutil.resolve_name(slow)
        monkeypatch.setattr(slow, lambda *args, **options: (time.sleep(0.05), function(*args, **options))[1])
    plain, explained = measure(SleepingSession(0.01 if slow else 0.1), items).variants
    # overlays are drawn with --explain alone
    bottleneck = (explained if stage == "draw" else plain).bottleneck
    assert (bottleneck.role, bottleneck.stage) == (role, stage)
    assert max(bottleneck.waits, key=lambda name: bottleneck.waits[name]) == reason
    assert (plain.bottleneck.role == role) is (stage != "draw")


@pytest.mark.parametrize("leaks", [10, 0])
def test_a_leaking_session_is_found_by_the_memory_curve(items: list[Item], leaks: int) -> None:
    many = list(itertools.islice(itertools.cycle(items), 60))
    first, second = measure(SleepingSession(0.01, leaks=leaks), many, interval=0.01).variants
    # judged, not merely too short to be judged
    assert first.memory.slope is not None
    assert first.memory.grows is bool(leaks)
    assert second.memory.grows in (False, bool(leaks))


def test_a_model_without_anchors_has_no_overlays_to_measure(linear_model: Path, items: list[Item]) -> None:
    result = measure(OnnxSession(linear_model, threads=1), items)
    assert [variant.name for variant in result.variants] == ["infer"]


def test_replayed_outputs_are_the_networks_in_order(exact_session: OnnxSession) -> None:
    images = np.random.default_rng(0).integers(0, 255, (3, 96, 96, 3), np.uint8)
    replay = ReplaySession.record(exact_session, [images[:2], images[2:]])
    replayed = Outputs.concatenate([replay.run(images[:2]), replay.run(images[:2])])
    expected = Outputs.concatenate([exact_session.run(images[:2]), exact_session.run(images[2:])])
    for name in ("logits", "argmax"):
        assert getattr(replayed, name).tolist() == getattr(expected, name)[[0, 1, 2, 0]].tolist()
    with pytest.raises(ValueError, match="a batch of 4, but only 3 outputs"):
        replay.run(np.zeros((4, 96, 96, 3), np.uint8))


def test_the_network_can_be_left_out(items: list[Item]) -> None:
    session = SleepingSession()
    result = measure(session, items, network=False)
    assert result.bare == ()
    # asked once for answers to repeat, never while the pipeline runs
    assert len(session.kept) == 6
    compute = result.variants[0].passes[0].times.sum_stage("compute")
    assert compute is not None
    assert compute.calls == 6
    assert result.session.startswith("no network: outputs precomputed by sleeping")


def test_without_network_and_decoding_a_pretended_gpu_holds_every_batch(items: list[Item]) -> None:
    result = measure(SleepingSession(), items, network=False, decoding=False, hold_ms=20)
    (variant,) = result.variants
    for one in variant.passes:
        # nothing is read, and a batch follows the other without a gap that counts
        assert one.times.select_role("decoders") == ()
        assert one.gpu_use is not None
        assert 0 < one.gpu_use <= 100
        assert one.seconds >= 0.02 * -(-one.images // 2)


def test_the_eager_baseline_predicts_as_the_session_does(items: list[Item], exact_model: Path) -> None:
    baseline = EagerBaseline(exact_model.with_suffix(".pt"), "cpu", 1)
    seen: list[int] = []
    predict = baseline._predict
    baseline._predict = lambda images: seen.extend(found := predict(images)) or found  # type: ignore[method-assign]
    one = baseline.measure([*items, Item(items[0].path.with_name("nothing.jpg"), "nothing.jpg")], 5)
    assert one.images == len(seen) == len(items)
    model = opal_deploy.load(exact_model, threads=1)
    assert seen == [record["prediction"]["class_id"] for record in model.explain([item.path for item in items])]


@pytest.fixture
def bench(opal: Callable, exact_model: Path, items: list[Item]) -> Callable[..., Any]:
    def run(*arguments: str | Path, model: Path = exact_model) -> Any:
        folder = items[0].path.parent
        options = ["--repeats", "2", "--threads", "1", "--json", *arguments]
        return opal("bench", "pipeline", folder, "--model", model, *options)

    return run


def test_the_command_reports_to_people_and_machines(bench: Callable, exact_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "pipeline.jsonl"
    done = bench("--batch", "4", "--workers", "1", "--plain", exact_model.with_suffix(".pt"), "--out", out)
    assert done.returncode == 0, done.stderr
    measurement = Measurement.from_line(done.stdout)
    figures, target = measurement.figures, measurement.target
    assert list(read_measurements([out])) == [measurement]
    assert measurement.kind == "pipeline"
    assert measurement.case == {
        "images": 12, "batch": 4, "workers": 1, "threads": 1, "image_size": "as given", "network": True,
        "decoding": True, "hold_ms": None, "decode": "default", "isolate": True,
    }  # fmt: skip
    assert target is not None
    assert (target.name, target.runtime, target.head) == (exact_model.name, "onnxruntime", "opal")
    assert measurement.command.startswith("opal-deploy bench pipeline pictures --model exact.onnx")
    for name in ("bare", "infer", "infer_explain", "plain"):
        assert (figures[name].unit, len(figures[name].repeats)) == ("images/s", 2)
    for name, reference in (("infer_share", "bare"), ("infer_over_plain", "plain")):
        ratios = [a / b for a, b in zip(figures["infer"].repeats, figures[reference].repeats, strict=True)]
        assert figures[name].repeats == pytest.approx(ratios)
    stages = {name.split(".")[1] for name in figures if name.endswith(".wall")}
    # on the CPU nothing is copied to a device
    assert stages == {"read", "decode", "resize", "compute", "evidence", "draw", "write"}
    assert 2 <= len(measurement.details["memory"]["infer"]["megabytes"]) <= 60
    assert f"infer: {figures['infer'].value:.1f} images/s" in done.stderr
    assert " x the plain script" in done.stderr
    assert measurement.details["bound"]["infer"]["line"] in done.stderr


def test_several_values_are_varied_without_the_network(bench: Callable, exact_model: Path) -> None:
    options = ("--batch", "4,8", "--workers", "1", "--image-size", "64x48", "--no-network", "--no-isolate")
    done = bench(*options, "--repeats", "1", model=exact_model.with_suffix(".pt"))
    assert done.returncode == 0, done.stderr
    measurements = [Measurement.from_line(line) for line in done.stdout.splitlines()]
    cases = [(m.case["batch"], m.case["workers"], m.case["image_size"]) for m in measurements]
    assert cases == [(8, 1, "64x48"), (4, 1, "64x48")]
    for measurement in measurements:
        # a checkpoint runs as `infer` runs it
        assert measurement.target is not None
        assert (measurement.target.runtime, measurement.target.device) == ("torch eager", "cpu")
        assert (measurement.case["network"], measurement.case["threads"]) == (False, 1)
        assert not {"bare", "infer_share", "bare.cpu"} & measurement.figures.keys()
        assert {"infer", "infer_explain"} <= measurement.figures.keys()
    assert all("images/s" in line and "peak" in line for line in done.stderr.splitlines()[-2:])
    assert "no network: outputs precomputed" in done.stderr


def test_a_checkpoint_is_measured_compiled_too(
    bench: Callable, exact_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # compiling takes a minute, and is another test's subject
    monkeypatch.setattr(compiled_session, "compile_graph", lambda graph: graph)
    monkeypatch.setattr(compiled_session, "find_compile_problem", lambda gpu: ("", ""))
    options = ("--batch", "4", "--workers", "1", "--no-explain", "--runtime", "compiled", "--device", "cpu")
    done = bench(*options, "--repeats", "1", model=exact_model.with_suffix(".pt"))
    assert done.returncode == 0, done.stderr
    target = Measurement.from_line(done.stdout).target
    assert target is not None
    assert (target.runtime, target.layout) == (
        "torch compiled",
        "uint8 NHWC, normalised on the device; convolutions NHWC",
    )
    assert "compiled on cpu" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runtime", "compiled"], "an ONNX file, and --runtime compiled runs a checkpoint"),
        (["--cuda-graphs"], "--cuda-graphs applies only to engines"),
        (["--workers", "x"], "--workers 'x': expected positive integers"),
        (["--image-size", "10"], "--image-size '10': expected WIDTHxHEIGHT"),
        (["--batch", "99"], "12 usable images for a batch of 99"),
        (["--plain", "{linear}"], "the model was exported from another checkpoint, exact.pt with sha256"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(
    bench: Callable, linear_model: Path, arguments: list[str], message: str
) -> None:
    done = bench(*(text.format(linear=linear_model.with_suffix(".pt")) for text in arguments))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert message in line
