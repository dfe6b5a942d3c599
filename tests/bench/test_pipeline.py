"""`bench pipeline` against sessions, decoders and disks of known slowness, and its command from end to end."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import opal_deploy
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.bench import measurement
from opal_deploy.bench.pipeline.cases import Case
from opal_deploy.bench.pipeline.eager_baseline import EagerBaseline
from opal_deploy.bench.pipeline.measure import CaseResult, ReplaySession, measure_case
from opal_deploy.errors import UsageError
from opal_deploy.inference.sources.items import Item
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.runtime.session import ImageBatch


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


SMALL = Case(2, 1)


def measured(session: Any, items: list[Item], case: Case = SMALL, **options: Any) -> CaseResult:
    return measure_case(session, items, case, **{"repeats": 1, "say": lambda _: None, **options})


def slowed(function: Callable, seconds: float) -> Callable:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments, **options)

    return slow


def test_all_three_are_measured_as_often_as_asked(items: list[Item]) -> None:
    heard: list[str] = []

    found = measured(SleepingSession(), items, repeats=3, say=heard.append)

    assert (len(found.bare), [len(variant.passes) for variant in found.variants]) == (3, [3, 3])
    assert [line.split(":")[0] for line in heard] == ["repeat 1 of 3", "repeat 2 of 3", "repeat 3 of 3"]
    assert found.images == found.given == 12


def test_a_slow_session_is_the_bound(items: list[Item]) -> None:
    found = measured(SleepingSession(0.1), items)

    plain, explained = found.variants
    for variant in (plain, explained):
        assert (variant.bound.station, variant.bound.stage) == ("session", "compute")
        compute = variant.passes[0].times.sum_stage("compute")
        assert compute is not None
        assert 6 * 0.1 <= compute.wall <= variant.passes[0].seconds
    # the loop stands and waits for it
    assert plain.bound.waited["session"] > 0.5
    # it sleeps, and nothing else has much to do
    assert plain.bound.cores_busy < 0.8


def test_a_slow_decoder_is_the_bound(items: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    from opal_deploy.inference.decoding import prepare

    monkeypatch.setattr(prepare, "decode_for", slowed(prepare.decode_for, 0.05))

    plain, _ = measured(SleepingSession(), items).variants

    assert (plain.bound.station, plain.bound.stage) == ("decoders", "decode")
    assert plain.bound.waited["pictures"] > 0.5
    # twenty a second is what one decoder can do, whatever is added
    assert 0 < plain.bound.capacity["decoders"] <= 20


def test_slow_reading_is_told_apart_from_slow_decoding(items: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    from opal_deploy.inference.decoding import prepare as reading

    monkeypatch.setattr(reading, "open_file", slowed(reading.open_file, 0.05))

    plain, _ = measured(SleepingSession(), items).variants

    assert (plain.bound.station, plain.bound.stage) == ("decoders", "read")


def test_slow_drawing_bounds_only_where_there_are_overlays(items: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    from opal_deploy.inference.run import drawing

    monkeypatch.setattr(drawing, "draw_overlay", slowed(drawing.draw_overlay, 0.05))

    plain, explained = measured(SleepingSession(0.01), items).variants

    assert (explained.bound.station, explained.bound.stage) == ("drawers", "draw")
    assert explained.bound.waited["drawing"] > 0.5
    assert plain.bound.station != "drawers"


def test_a_slow_disk_is_the_bound(items: list[Item], monkeypatch: pytest.MonkeyPatch) -> None:
    from opal_deploy.inference.run.results import RecordWriter

    monkeypatch.setattr(RecordWriter, "write", slowed(RecordWriter.write, 0.05))

    plain, _ = measured(SleepingSession(), items).variants

    assert (plain.bound.station, plain.bound.stage) == ("loop", "write")
    assert plain.bound.waited["disk"] > 0.8


def test_a_leaking_session_is_found_by_the_memory_curve(items: list[Item]) -> None:
    many = list(itertools.islice(itertools.cycle(items), 60))
    leaking = measured(SleepingSession(0.01, leaks=10), many, interval=0.01)
    assert leaking.variants[0].memory.grows
    assert leaking.variants[0].memory.end - leaking.variants[0].memory.start > 200


def test_a_session_that_keeps_nothing_is_flat(items: list[Item]) -> None:
    many = list(itertools.islice(itertools.cycle(items), 60))
    flat = measured(SleepingSession(0.01), many, interval=0.01)
    assert [variant.memory.grows for variant in flat.variants] == [False, False]
    # judged, not merely too short to be judged
    assert flat.variants[0].memory.slope is not None


def test_pictures_that_cannot_be_used_count_for_nobody(items: list[Item]) -> None:
    items[3].path.write_bytes(b"")
    found = measured(SleepingSession(), items)
    assert (found.images, found.given) == (11, 12)
    assert {one.images for one in (*found.bare, *found.variants[0].passes)} == {11}


def test_a_model_without_anchors_has_no_overlays_to_measure(linear_model: Path, items: list[Item]) -> None:
    found = measured(OnnxSession(linear_model, threads=1), items)
    assert [variant.name for variant in found.variants] == ["infer"]


def test_fewer_pictures_than_a_batch_are_refused(items: list[Item]) -> None:
    with pytest.raises(UsageError, match="12 usable pictures, and a batch takes 16"):
        measured(SleepingSession(), items, Case(16, 1))


def test_without_the_network_its_time_is_gone_and_there_is_nothing_to_compare_with(items: list[Item]) -> None:
    found = measured(SleepingSession(0.2), items, network=False)

    assert found.bare == ()
    compute = found.variants[0].passes[0].times.sum_stage("compute")
    assert compute is not None
    assert compute.calls == 6
    assert compute.wall < 0.2
    assert found.session.startswith("no network: answers computed beforehand by sleeping")


def test_replayed_answers_are_the_networks_in_turn(exact_model: Path) -> None:
    session = OnnxSession(exact_model, threads=1)
    images = np.random.default_rng(0).integers(0, 255, (5, 96, 96, 3), np.uint8)
    replay = ReplaySession.of(session, [images[:3], images[3:]])

    found = Outputs.concatenate([replay.run(images[:4]), replay.run(images[:4])])

    expected = Outputs.concatenate([session.run(images[:3]), session.run(images[3:])])
    order = [0, 1, 2, 3, 4, 0, 1, 2]
    assert found.logits.tolist() == expected.logits[order].tolist()
    assert found.argmax is not None
    assert expected.argmax is not None
    assert found.argmax.tolist() == expected.argmax[order].tolist()


def test_more_pictures_than_answers_cannot_be_replayed() -> None:
    session = SleepingSession()
    replay = ReplaySession.of(session, [np.zeros((2, 32, 32, 3), np.uint8)])
    with pytest.raises(ValueError, match="a batch of 3; only 2 answers"):
        replay.run(np.zeros((3, 32, 32, 3), np.uint8))


@pytest.fixture
def bench(opal: Callable, exact_model: Path, items: list[Item]) -> Callable[..., Any]:
    def run(*arguments: str | Path, model: Path = exact_model) -> Any:
        folder = items[0].path.parent
        return opal("bench", "pipeline", folder, "--model", model, "--repeats", "2", "--threads", "1", *arguments)

    return run


def lines(text: str) -> list[measurement.Measurement]:
    return [measurement.Measurement.from_line(line) for line in text.splitlines()]


def test_the_command_tells_people_and_machines(bench: Callable, exact_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "pipeline.jsonl"

    done = bench("--batch", "4", "--workers", "1", "--json", "--out", out)

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert list(measurement.read_measurements([out])) == [found]
    assert found.kind == "pipeline"
    assert found.case == {
        "images": 12, "batch": 4, "workers": 1, "threads": 1, "image_size": "as given", "network": True,
        "decode": "default", "isolate": True,
    }  # fmt: skip
    assert found.target is not None
    assert (found.target.name, found.target.runtime, found.target.head) == (exact_model.name, "onnxruntime", "opal")
    assert found.command.startswith("opal-deploy bench pipeline pictures --model exact.onnx")
    for name in ("bare", "infer", "infer_explain"):
        assert (found.figures[name].unit, len(found.figures[name].repeats)) == ("images/s", 2)
    ratios = [a / b for a, b in zip(found.figures["infer"].repeats, found.figures["bare"].repeats, strict=True)]
    assert found.figures["infer_share"].repeats == pytest.approx(ratios)
    stages = {name.split(".")[1] for name in found.figures if name.endswith(".wall")}
    # on the CPU nothing is copied to a device
    assert stages == {"read", "decode", "resize", "batch", "compute", "evidence", "draw", "write"}
    assert 2 <= len(found.details["memory"]["infer"]["megabytes"]) <= 60
    assert f"infer: {found.figures['infer'].value:.1f} images/s" in done.stderr
    assert found.details["bound"]["infer"]["line"] in done.stderr


def test_the_same_model_as_a_script_runs_it_is_measured_in_turn(bench: Callable, exact_model: Path) -> None:
    done = bench("--batch", "4", "--workers", "1", "--json", "--plain", exact_model.with_suffix(".pt"))

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert (found.figures["plain"].unit, len(found.figures["plain"].repeats)) == ("images/s", 2)
    ratios = [a / b for a, b in zip(found.figures["infer"].repeats, found.figures["plain"].repeats, strict=True)]
    assert found.figures["infer_over_plain"].repeats == pytest.approx(ratios)
    assert " x plain PyTorch and Pillow" in done.stderr


def test_the_script_answers_as_the_session_does(items: list[Item], exact_model: Path) -> None:
    loop = EagerBaseline(exact_model.with_suffix(".pt"), "cpu", 1)
    seen: list[int] = []
    answer = loop._answer
    loop._answer = lambda images: seen.extend(found := answer(images)) or found  # type: ignore[method-assign]
    done = loop.measure([*items, Item(items[0].path.with_name("nothing.jpg"), "nothing.jpg")], 5)
    assert done.images == len(seen) == len(items)
    model = opal_deploy.load(exact_model, threads=1)
    assert seen == [
        measurement["prediction"]["class_id"] for measurement in model.explain([item.path for item in items])
    ]


def test_another_models_checkpoint_is_refused(bench: Callable, map_model: Path) -> None:
    done = bench("--plain", map_model.with_suffix(".pt"))
    assert done.returncode == 2
    assert "the model was exported from another file, exact.pt of sha256" in done.stderr


def test_growth_has_a_line_a_case(bench: Callable) -> None:
    done = bench(
        *("--batch", "4,8", "--workers", "1,2", "--image-size", "64x48,200x150", "--repeats", "1", "--json"),
    )

    assert done.returncode == 0, done.stderr
    told = [(m.case["batch"], m.case["workers"], m.case["image_size"]) for m in lines(done.stdout)]
    assert len(told) == len(set(told))
    base = told[0]
    assert base[0] == 8
    assert base[2] == "as given"
    # all others differ from it in one value
    assert {sum(a != b for a, b in zip(base, case, strict=True)) for case in told[1:]} == {1}
    assert {case[0] for case in told} == {4, 8}
    assert {case[1] for case in told} >= {1, 2}
    assert {case[2] for case in told} == {"as given", "64x48", "200x150"}
    summary = done.stderr.splitlines()[-len(told) :]
    assert all("images/s" in line and "peak" in line for line in summary)


def test_without_the_network_the_record_says_so(bench: Callable) -> None:
    done = bench("--no-network", "--json", "--repeats", "1")

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert found.case["network"] is False
    assert not {"bare", "infer_share", "bare.cpu"} & found.figures.keys()
    assert {"infer", "infer_explain"} <= found.figures.keys()
    assert "no network: answers computed beforehand" in done.stderr


def test_a_checkpoint_is_measured_as_infer_runs_it(bench: Callable, exact_model: Path) -> None:
    done = bench("--json", "--repeats", "1", model=exact_model.with_suffix(".pt"))

    assert done.returncode == 0, done.stderr
    (found,) = lines(done.stdout)
    assert found.target is not None
    assert (found.target.runtime, found.target.device) == ("torch eager", "cpu")
    assert found.case["threads"] == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch", "0"], "--batch '0': expected whole numbers"),
        (["--workers", "x"], "--workers 'x': expected whole numbers"),
        (["--image-size", "10"], "--image-size '10': expected WIDTHxHEIGHT"),
        (["--batch", "99"], "12 usable pictures, and a batch takes 99"),
    ],
)
def test_a_wrong_call_is_answered_in_one_line(bench: Callable, arguments: list[str], expected: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert expected in line
