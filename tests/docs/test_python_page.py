"""The script of "From Python", as it stands, on real photographs that have neither boxes nor parts."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import opal_deploy
from tests.cli.calls import check

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/howto/python.md"


def test_the_reference_lists_the_signatures_as_they_are():
    tool = runpy.run_path(str(ROOT / "tools/python_reference.py"))
    page = tool["PAGE"].read_text("utf-8")
    assert "run_inference(images, model, *, " in page
    assert page == tool["fill"](page), "write it again with: python tools/python_reference.py"


@pytest.fixture
def script(pets_mini, tmp_path):
    """The page's blocks for photographs in `pets/`: those before Lightning's, and all from the own loop on."""
    for breed in ("Bengal", "pug", "Sphynx"):
        for number, path in enumerate(sorted((pets_mini / "images").glob(f"{breed}_*.jpg"))):
            folder = tmp_path / "pets" / ("test" if number % 5 == 0 else "train") / breed
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).symlink_to(path)
    page = PAGE.read_text("utf-8").replace('"photos"', '"pets"')
    parts = page.partition("With Lightning ")[0], page[page.index("## Train in a loop of your own") :]
    return ["".join(re.findall(r"```python\n(.*?)```", part, re.DOTALL)) for part in parts]


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_runs_as_it_stands_on_photographs_of_ones_own(script, shared_weights, tmp_path):
    code = script[0]
    assert code.count('"imagenet"') == 1
    code = code.replace('"imagenet"', f'"{shared_weights / "resnet18_ktb_small.safetensors"}"')
    done = check(subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True))
    assert done.stderr == ""
    assert re.search(r"Test: \d+\.\d% of 6 images\nNone\n", done.stdout)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert {"overlay.jpg", "sheet.png", "report/report.html", "close-calls/report.html"} <= written
    assert "Accuracy: " in (tmp_path / "report/report.html").read_text("utf-8")


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_network_trained_with_lightning_becomes_a_checkpoint(script, tmp_path):
    start = "from pathlib import Path\nimport opal_deploy\nphotos = Path('pets')\n"
    check(subprocess.run([sys.executable, "-c", start + script[1]], cwd=tmp_path, capture_output=True, text=True))
    loaded = opal_deploy.load(tmp_path / "lightning.pt", threads=1)
    assert list(loaded.names.values()) == ["Bengal", "Sphynx", "pug"]
