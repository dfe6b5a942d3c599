"""`bench pipeline`: sessions, decoders and disks of known slowness, and its command from end to end."""

import json
import time

import numpy as np
import pytest

from opal_deploy.artifact.preprocessing import InputForm
from opal_deploy.bench.measurement import Target
from opal_deploy.bench.models import TimedModel
from opal_deploy.bench.options import PipelineOptions
from opal_deploy.bench.pipeline import decode_images, measure_pipeline
from opal_deploy.errors import UsageError
from opal_deploy.sources.image import InputImage
from tests.bright import BrightSession
from tests.cli.calls import check


class SleepingSession(BrightSession):
    """Takes a tenth of a second per batch."""

    def run(self, images):
        time.sleep(0.1)
        return super().run(images)


@pytest.fixture
def items(tmp_path, make_pictures):
    return [InputImage.at(path) for path in make_pictures(tmp_path / "pictures", 12)]


def test_whole_batches_of_usable_images_are_decoded(items):
    items[1].source.write_bytes(b"no image")
    assert decode_images(items, InputForm(32, 48), 5).shape == (10, 32, 48, 3)
    with pytest.raises(UsageError, match=r"11 usable images for a batch of 12; give more, or a smaller --batch"):
        decode_images(items, InputForm(32, 32), 12)


def measure(session, items, progress=lambda done, total: None, **options):
    chosen = PipelineOptions(**{"repeats": 1, "batch": 2, "workers": 1, "isolate": False, **options})
    return measure_pipeline(TimedModel(session, Target("m", device=session.device), 1), items, chosen, progress)


def test_everything_is_measured_once_a_repeat_on_the_usable_images(items):
    items[3].source.write_bytes(b"")
    done = []
    row = measure(BrightSession(), items, repeats=3, progress=lambda *counts: done.append(counts))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert [len(row.figures[name].repeats) for name in ("bare", "infer", "infer_explain")] == [3, 3, 3]
    assert (row.case["images"], row.details["given"]) == (11, 12)
    ratios = np.divide(row.figures["infer"].repeats, row.figures["bare"].repeats)
    assert row.figures["infer_share"].repeats == pytest.approx(tuple(ratios))


def test_a_pipelined_session_is_measured_with_its_batches_in_flight(items, pipelined):
    session = pipelined.session
    row = measure(session, items, explain=False)
    assert "infer_explain" not in row.figures
    # the bare session and `infer` alike
    assert (max(session.waits), session.locked, session.in_flight) == (3, {}, [])
    # one batch and three of warm-up, six of the bare session, and those of `infer`
    assert session.from_locked == 1 + 3 + 6 + 6


def test_a_slow_session_takes_the_time_and_the_loop_waits_for_it(items):
    row = measure(SleepingSession(), items)
    for kind, expected in (("wall", "compute"), ("waited", "session")):
        values = {key: figure.value for key, figure in row.figures.items() if key.startswith("infer.") and kind in key}
        assert max(values, key=values.get) == f"infer.{expected}.{kind}"


@pytest.fixture
def bench(opal, exact_model, items):
    def run(*arguments):
        folder = items[0].source.parent
        options = ["--repeats", "2", "--threads", "1", "--json", *arguments]
        return opal("bench", "pipeline", folder, "--model", exact_model, *options)

    return run


def test_the_command_reports_to_people_and_machines(bench, exact_model, tmp_path):
    out = tmp_path / "pipeline.jsonl"
    done = check(bench("--batch", "4", "--workers", "1", "--out", out))
    measurement = json.loads(done.stdout)
    figures, target = measurement["figures"], measurement["target"]
    assert json.loads(out.read_text()) == measurement
    assert measurement["case"] == {
        "images": 12, "batch": 4, "workers": 1, "threads": 1, "decode": "default", "isolate": True,
    }  # fmt: skip
    assert (target["name"], target["runtime"], target["head"]) == (exact_model.name, "onnxruntime", "opal")
    stages = {name.split(".")[1] for name in figures if name.endswith(".wall")}
    # on the CPU nothing is copied to a device
    assert stages == {"read", "decode", "resize", "compute", "evidence", "draw", "write"}
    assert "\n infer " in done.stderr
    assert all(note in done.stderr for note in measurement["details"]["notes"])
