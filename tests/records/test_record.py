"""Records built by the batch, against the paper's formulas written out for one image at a time."""

from __future__ import annotations

import numpy as np
import pytest

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.outputs import Outputs, cosines
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.record import ImageInfo, build_records

C, M, N = 60, 3, 11
METADATA = Metadata(
    tuple(map(str, range(C))), M, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 7), (64, 112)
)


@pytest.mark.parametrize("top", [1, 5, 40])
def test_a_batch_of_records_is_what_each_image_says_alone(top: int) -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((N, C * M)).astype(np.float32)
    scores[3] = 0.5  # every class ties: the lowest ids come first
    argmax = rng.integers(0, 28, (N, C * M)).astype(np.int32)
    logits = -np.sqrt(2 - 2 * cosines(scores, M, 1e-8)).astype(np.float32)
    images = [ImageInfo(f"{i}.png", Geometry(500 + i, 333, (i, 3, 411 + i, 330))) for i in range(N)]
    records = build_records(images, Outputs(logits, argmax, scores), METADATA, top=top, min_margin=0.01)
    for i, (record, image) in enumerate(zip(records, images, strict=True)):
        order = sorted(range(C), key=lambda c: (-logits[i, c], c))
        assert [answer["class_id"] for answer in record["top"]] == order[:top]
        assert record["prediction"] == record["top"][0]
        z = scores[i].astype(np.float64) / (np.linalg.norm(scores[i].astype(np.float64)) + 1e-8)
        cosine = z.reshape(C, M).sum(axis=1) / np.sqrt(M)
        margin = cosine[order[0]] - cosine[order[1]]
        assert record["margin"] == pytest.approx(margin, abs=1e-12)
        assert record["status"] == ("abstained" if margin < 0.01 else "ok")
        for slot, found in enumerate(record["evidence"]):
            channel = order[0] * M + slot
            cell = divmod(int(argmax[i, channel]), 7)
            assert (found["slot"], found["channel"], tuple(found["cell"])) == (slot, channel, cell)
            assert found["score"] == float(scores[i, channel])
            assert found["contribution"] == pytest.approx(z[channel] / np.sqrt(M), abs=1e-12)
            assert tuple(found["box"]) == image.geometry.cell_box(*cell, METADATA.grid)
