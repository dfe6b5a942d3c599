"""Records made by hand: what each slot scored and where, for an image of a given size; reports of them; a browser."""

import numpy as np
import pytest
from msgspec.structs import replace

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records
from opal_deploy.records.decision import Decision
from opal_deploy.visualization.report import ReportOptions, ReportWriter
from tests.browser import open_browser

GRID = (5, 5)


@pytest.fixture(scope="session")
def make_record():
    def make(size, cells=((0, 0), (2, 3), (4, 4)), scores=None, *, min_margin=None, distance="l2", **names):
        """Class 0 wins with its slots at `cells` of a 5 x 5 grid; class 1 scores low."""
        labels = names.get("labels", ("Sooty Albatross", "Crested Auklet"))
        m = len(cells)
        metadata = Metadata(labels, m, {"distance": distance, "epsilon": 1e-8}, "exact", "resnet50", GRID, (224, 224))
        own = np.full(m, 0.9) if scores is None else np.asarray(scores)
        outputs = Outputs(
            np.array([[-0.3, -1.2]], dtype=np.float32),
            np.array([[row * GRID[1] + col for row, col in cells] + [0] * m], dtype=np.int32),
            np.concatenate([own, np.full(m, 0.1)])[None].astype(np.float32),
        )
        image = names.get("image", "a/b.jpg")
        (record,) = build_records(
            [ImageInfo(image, Geometry.whole(*size))], outputs, metadata, decision=Decision(min_margin=min_margin)
        )
        return record

    return make


@pytest.fixture
def answer_without_evidence(make_record):
    record = make_record((200, 200))
    top = tuple(replace(answer, cosine=None) for answer in record.top)
    return replace(record, evidence=(), margin=None, prediction=top[0], top=top)


@pytest.fixture
def write_report(tmp_path):
    """Writes `report.html` of (record, image) pairs, or of records alone."""

    def write(entries, summary=(), *, image_mode="embed", **options):
        path = tmp_path / "report.html"
        with ReportWriter(path, ReportOptions(**options), image_mode=image_mode) as report:
            for entry in entries:
                report.add(*(entry if isinstance(entry, tuple) else (entry, None)))
            report.close(summary)
        return path

    return write


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def open_page(browser):
    """Loads a file in a tab; `page.problems` collects errors, refusals and dialogs."""
    tabs = {}

    def open_tab(width, options):
        context = browser.new_context(viewport={"width": width, "height": 900}, is_mobile=width < 600, **options)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("dialog", lambda dialog: (page.problems.append(dialog.message), dialog.dismiss()))
        return page

    def open_page(path, fragment="", *, width=1280, **options):
        key = f"{width} {options}"
        page = tabs[key] = tabs.get(key) or open_tab(width, options)
        page.goto("about:blank")  # another fragment alone loads nothing
        page.problems = []
        page.goto(path.resolve().as_uri() + fragment)
        return page

    return open_page
