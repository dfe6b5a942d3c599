"""Records made by hand: what each slot scored and where, for an image of a given size; reports of them."""

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import build_record
from opal_deploy.visualization.report import ReportWriter

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
        return build_record(image, Geometry.whole(*size), outputs, 0, metadata, min_margin=min_margin)

    return make


@pytest.fixture
def answer_without_evidence(make_record):
    record = make_record((200, 200))
    del record["evidence"]
    record["margin"] = None
    for answer in (record["prediction"], *record["top"]):
        answer["cosine"] = None
    return record


@pytest.fixture
def write_report(tmp_path):
    """Writes `report.html` of (record, image) pairs, or of records alone."""

    def write(entries, summary=(), **options):
        path = tmp_path / "report.html"
        with ReportWriter(path, **{"title": "Run", "facts": [], **options}) as report:
            for entry in entries:
                report.add(*(entry if isinstance(entry, tuple) else (entry, None)))
            report.close(summary)
        return path

    return write
