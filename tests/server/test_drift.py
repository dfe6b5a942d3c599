"""Windows of a server with a baseline: counted, compared, exported, and named by the alert rules and the dashboard."""

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import jsonschema
import numpy as np
import pytest
import yaml
from PIL import Image

import opal_deploy
from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.baseline import PLACES, Baseline
from opal_deploy.errors import UsageError
from opal_deploy.model.config import HeadConfig
from opal_deploy.records.observations import observe_records
from opal_deploy.records.record import to_record
from opal_deploy.records.shifts import KINDS
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.server.drift import DriftMonitor, WindowSize, open_monitor
from tests.builders import build_checkpoint, export_onnx

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES, DASHBOARD = DEPLOY / "prometheus/alerts.yaml", DEPLOY / "grafana/drift.json"
SCHEMA = Path(__file__).parents[1] / "packaging/schemas/dashboard.json"
WINDOW = 20


@pytest.fixture(scope="module")
def pictures():
    """Squares of random colours."""
    squares = np.random.default_rng(0).integers(0, 256, (200, 6, 6, 3), np.uint8)
    return [Image.fromarray(one.repeat(16, axis=0).repeat(16, axis=1)) for one in squares]


@pytest.fixture(scope="module")
def model(tmp_path_factory, pictures):
    """A tiny network with the baseline of all pictures."""
    path = tmp_path_factory.mktemp("drift") / "model.onnx"
    export_onnx(build_checkpoint(head=HeadConfig(prototypes_per_class=3), size=(96, 96)), path)
    metadata = onnx_file.read_metadata(path)
    records = opal_deploy.load(path, device="cpu", threads=1).predict(pictures)
    observed = observe_records([each.record for each in records], metadata.class_map.max_slots, metadata.grid)
    baseline = Baseline.measure(observed, "val", metadata.stride, metadata.class_map)
    onnx_file.rewrite_metadata(path, replace(metadata, baseline=json.loads(json.dumps(baseline.to_dict()))))
    return path


@pytest.fixture(scope="module")
def records(model, pictures):
    return list(opal_deploy.load(model, device="cpu", threads=1).predict(pictures))


def _find_rare(records):
    """Return the first image with the class that is predicted least often."""
    classes = [record["prediction"]["class_id"] for record in records]
    return classes.index(min(classes, key=classes.count))


@pytest.fixture(scope="module")
def scraped(serving, model, pictures, records):
    """The JSON of /drift and the text of /metrics of a server that answered the same picture over and over."""
    stream = io.BytesIO()
    pictures[_find_rare(records)].save(stream, "PNG")
    session = OnnxSession(model, device="cpu", threads=1)
    with serving({"birds": session}, path=model, limits={"drift_window": str(WINDOW)}) as running:
        before = httpx.get(f"{running.url}/drift").json()["models"]["birds"]
        assert (before["windows"], before["last"], before["current"]["compared"]) == (0, None, False)
        for _ in range(WINDOW + 3):
            assert httpx.post(f"{running.url}/explain", content=stream.getvalue()).status_code == 200
        httpx.post(f"{running.url}/explain", content=b"no image")
        yield httpx.get(f"{running.url}/drift").json(), httpx.get(f"{running.url}/metrics").text


def test_a_server_reports_the_shifts_of_its_last_window(scraped, records):
    document, text = scraped
    birds = document["models"]["birds"]
    assert (birds["windows"], birds["last"]["images"], birds["current"]["images"]) == (1, WINDOW, 3)
    assert birds["last"]["max_q"] == WINDOW / 10_000
    # the same picture over and over is no sample of the baseline's
    label = records[_find_rare(records)]["prediction"]["label"]
    assert any(shift["kind"] == "label" and shift["label"] == label for shift in birds["last"]["shifts"])
    values = dict(re.findall(r'^opal_drift_shifts\{kind="(\w+)",model="birds"\} (\S+)$', text, re.MULTILINE))
    counted = {kind: sum(shift["kind"] == kind for shift in birds["last"]["shifts"]) for kind in KINDS}
    assert {kind: int(float(value)) for kind, value in values.items()} == counted
    assert f'opal_drift_window_images{{model="birds"}} {WINDOW}.0' in text


def test_a_model_without_a_baseline_has_no_windows(serving, exact_session):
    with serving({"trees": exact_session}) as running:
        assert httpx.get(f"{running.url}/drift").json() == {"window": "500", "models": {"trees": None}}
        assert "opal_drift_shifts{" not in httpx.get(f"{running.url}/metrics").text
    assert open_monitor(exact_session.metadata, WindowSize.parse("500")) is None


def test_windows_of_a_duration_end_by_a_clock_that_nobody_sets(model, records):
    metadata = onnx_file.read_metadata(model)
    now = [0.0]
    monitor = DriftMonitor(metadata, Baseline.from_dict(metadata.baseline), WindowSize.parse("30m"), lambda: now[0])
    for explanation in records:
        monitor.count(explanation.record)
    assert monitor.compare_last() is None
    now[0] = 1800.0
    last = monitor.compare_last()
    assert (last.window.counts.images, last.shifts) == (len(records), [])
    # nothing came: an empty window is not compared
    now[0] = 3600.0
    described = monitor.describe()
    assert (described["windows"], described["last"]["images"], described["last"]["compared"]) == (2, 0, False)


def test_a_window_names_the_slot_that_moved(model, records):
    metadata = onnx_file.read_metadata(model)
    monitor = open_monitor(metadata, WindowSize.parse("200"))
    class_id = int(np.bincount([record["prediction"]["class_id"] for record in records]).argmax())
    for record in json.loads(json.dumps(records)):
        if record["prediction"]["class_id"] == class_id:
            record["evidence"][1]["cell"] = [2, 0]
        monitor.count(to_record(record))
    shift = monitor.describe()["last"]["shifts"][0]
    assert (shift["kind"], shift["slot"], shift["class_id"], shift["place"]) == ("place", 1, class_id, PLACES[6])


@pytest.mark.parametrize("text", ["", "-5", "7", "6x", "0h", "1.5h"])
def test_a_window_of_no_size_is_refused(text):
    with pytest.raises(UsageError, match="--drift-window"):
        WindowSize.parse(text)


def exported(text):
    """Return the names of the series that a server exports."""
    return set(re.findall(r"^(opal_\w+?)(?:\{| )", text, re.MULTILINE))


def test_rules_and_dashboard_name_only_what_the_server_exports(scraped):
    names = exported(scraped[1])
    rules = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    expressions = [rule["expr"] for rule in rules]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in re.findall(r"opal_\w+", expression)}
    assert used
    assert used <= names
    assert {
        kind for expr in expressions for kinds in re.findall('kind=~?"(.*?)"', expr) for kind in kinds.split("|")
    } == {*KINDS}


def test_every_alert_has_its_part_of_the_page():
    page = (DEPLOY.parent / "docs/howto/drift.md").read_text("utf-8")
    for rule in yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"]:
        assert f"\n### {rule['alert']}\n" in page
        assert rule["annotations"]["runbook"] == f"howto/drift.md#{rule['alert'].lower()}"


def test_the_dashboard_fits_its_schema():
    schema = json.loads(SCHEMA.read_text("utf-8"))
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    jsonschema.Draft202012Validator(schema).validate(dashboard)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    dashboard["panels"][0]["gridPos"]["w"] = 25
    assert not jsonschema.Draft202012Validator(schema).is_valid(dashboard)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_prometheus_accepts_the_rules_and_the_metrics_and_raises_the_alarm(scraped, tmp_path):
    def promtool(*arguments, **options):
        done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("check", "rules", str(RULES))
    promtool("check", "metrics", input="".join(line for line in scraped[1].splitlines(True) if "opal_" in line))
    alert = {"exp_labels": {"model": "birds", "severity": "warning"}}
    summary = yaml.safe_load(RULES.read_text("utf-8"))["groups"][0]["rules"][0]["annotations"]["summary"]
    alert["exp_annotations"] = {
        "summary": summary.replace("{{ $labels.model }}", "birds"), "runbook": "howto/drift.md#opalslotsmoved"
    }  # fmt: skip
    series = 'opal_drift_shifts{model="birds", kind="place"}'
    document = {
        "rule_files": [str(RULES)],
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": series, "values": "0 0 2 2"}],
                "alert_rule_test": [
                    {"eval_time": "1m", "alertname": "OpalSlotsMoved"},
                    {"eval_time": "3m", "alertname": "OpalSlotsMoved", "exp_alerts": [alert]},
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(tmp_path / "test.yaml"))
