"""The script of tasks.py, without `Any` where a type is known, as it stands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.calls import check

ROOT, SCRIPT = Path(__file__).parents[2], Path(__file__).with_name("tasks.py")
# its baseline and OOD score are measured
MODEL = ROOT / "opal_deploy/cli/demo/creatures.onnx"
PYRIGHT = ROOT / ".ort-web/node_modules/.bin/pyright"


def test_the_tasks_run(make_pictures, tmp_path):
    make_pictures(tmp_path / "images/bimlu", 20)
    command = [sys.executable, SCRIPT, MODEL, tmp_path / "images", tmp_path]
    done = check(subprocess.run(command, capture_output=True, text=True))
    first, last = done.stdout.strip().splitlines()[-2:]
    assert "sheet.png 20 " in first
    assert last.split()[:1] + last.split()[2:] == ["True", "20", "file", "20", "20", "50"]


@pytest.mark.skipif(not PYRIGHT.exists(), reason="no pyright: `make ort-web`")
def test_pyright_finds_the_types_and_a_wrong_name(tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import opal_deploy\nprint(opal_deploy.load('m').predict('a.jpg').lable)\nopal_deploy.lode('m')\n")
    settings = {"include": [str(SCRIPT), str(wrong)], "typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [PYRIGHT, "--project", tmp_path, "--pythonpath", sys.executable, "--outputjson"], capture_output=True, text=True
    )
    found = [(Path(each["file"]).name, each["rule"]) for each in json.loads(done.stdout)["generalDiagnostics"]]
    assert [name for name, rule in found if rule == "reportAttributeAccessIssue"] == ["wrong.py", "wrong.py"]
    assert [name for name, _ in found if name == "tasks.py"] == [], done.stdout
