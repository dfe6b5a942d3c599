"""Records built by the batch, against the paper's formulas written out for one image at a time."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from opal_deploy.artifact.metadata import Metadata
from opal_deploy.artifact.opal_head import cosines
from opal_deploy.artifact.outputs import Outputs, select_top
from opal_deploy.preprocess.geometry import Geometry
from opal_deploy.records.build import ImageInfo, build_records, class_evidence
from opal_deploy.records.decision import Decision
from opal_deploy.records.lines import to_document
from tests.builders import cell_box

C, M, N = 60, 3, 11
METADATA = Metadata(
    tuple(map(str, range(C))), M, {"distance": "l2", "epsilon": 1e-8}, "exact", "none", (4, 7), (64, 112)
)


@pytest.mark.parametrize("top", [1, 5, 40])
def test_a_batch_of_records_is_what_each_image_says_alone(top):
    rng = np.random.default_rng(0)
    scores = rng.random((N, C * M)).astype(np.float32)
    scores[3] = 0.5  # every class ties: the lowest ids come first
    argmax = rng.integers(0, 28, (N, C * M)).astype(np.int32)
    logits = -np.sqrt(2 - 2 * cosines(scores, METADATA.class_map, 1e-8)).astype(np.float32)
    images = [ImageInfo(f"{i}.png", Geometry(500 + i, 333, (i, 3, 411 + i, 330))) for i in range(N)]
    records = build_records(
        images, Outputs(logits, argmax, scores), METADATA, top=top, decision=Decision(min_margin=0.01)
    )
    for i, (record, image) in enumerate(zip(records, images, strict=True)):
        order = sorted(range(C), key=lambda c: (-logits[i, c], c))
        assert [answer.class_id for answer in record.top] == order[:top]
        assert record.prediction == record.top[0]
        z = scores[i].astype(np.float64) / (np.linalg.norm(scores[i].astype(np.float64)) + 1e-8)
        cosine = z.reshape(C, M).sum(axis=1) / np.sqrt(M)
        margin = cosine[order[0]] - cosine[order[1]]
        assert record.margin == pytest.approx(margin, abs=1e-12)
        assert record.status == ("abstained" if margin < 0.01 else "ok")
        for slot, found in enumerate(record.evidence):
            channel = order[0] * M + slot
            cell = divmod(int(argmax[i, channel]), 7)
            assert (found.slot, found.channel, found.cell) == (slot, channel, cell)
            assert found.score == float(scores[i, channel])
            assert found.contribution == pytest.approx(z[channel] / np.sqrt(M), abs=1e-12)
            assert found.box == cell_box(image.geometry, *cell, METADATA.grid)


def test_a_calibrated_model_gives_each_listed_class_its_probability_among_all():
    rng = np.random.default_rng(2)
    scores = rng.random((N, C * M)).astype(np.float32)
    argmax = rng.integers(0, 28, (N, C * M)).astype(np.int32)
    logits = rng.uniform(-1.4, 0, (N, C)).astype(np.float32)
    logits[0] *= 1e4  # only one class is left: the others underflow to 0, not to NaN
    calibration = {"method": "temperature", "images": 60, "temperature": 0.1, "ece": 0.02}
    calibrated = replace(METADATA, calibration=calibration)
    images = [ImageInfo(f"{i}.png", Geometry(500, 333, (0, 0, 500, 333))) for i in range(N)]
    plain, records = (build_records(images, Outputs(logits, argmax, scores), m, top=4) for m in (METADATA, calibrated))
    shares = np.exp((logits.astype(np.float64) - logits.max(axis=1, keepdims=True)) / 0.1)
    shares /= shares.sum(axis=1, keepdims=True)
    for record, without, share in zip(records, plain, shares, strict=True):
        listed = [share[answer.class_id] for answer in record.top]
        assert [answer.calibrated_probability for answer in record.top] == pytest.approx(listed, abs=1e-12)
        assert record.prediction == record.top[0]
        # everything else is what it is without a temperature
        top = tuple(structs.replace(answer, calibrated_probability=None) for answer in record.top)
        assert structs.replace(record, top=top, prediction=top[0]) == without
    # the best classes alone do not say what the others' logits are
    best = Outputs(np.empty((N, 0), np.float32), top=select_top(Outputs(logits, argmax, scores), METADATA.class_map, 4))
    assert build_records(images, best, calibrated, top=4) == build_records(images, best, METADATA, top=4)


@pytest.mark.parametrize("distance", ["l2", "kl", "linf"])
def test_records_of_the_best_classes_alone_are_those_of_all_outputs(distance):
    rng = np.random.default_rng(1)
    scores = rng.random((N, C * M)).astype(np.float32)
    argmax = rng.integers(0, 28, (N, C * M)).astype(np.int32)
    everything = Outputs(rng.integers(-9, 0, (N, C)).astype(np.float32), argmax, scores)
    best = Outputs(np.empty((N, 0), np.float32), top=select_top(everything, METADATA.class_map, 5))
    metadata = replace(METADATA, head={**METADATA.head, "distance": distance})
    images = [ImageInfo(None, Geometry(500, 333, (i, 3, 411 + i, 330))) for i in range(N)]
    rows = [7, 0, 3]

    def build(outputs):
        records = build_records(images[:4], outputs.rows(2, 6), metadata)
        records += build_records(images[:3], outputs.take(rows), metadata, top=2, decision=Decision(min_margin=0.01))
        return records + build_records(images, Outputs.concatenate([outputs.rows(0, 4), outputs.rows(4, N)]), metadata)

    assert list(map(to_document, build(best))) == [approx_record(to_document(each)) for each in build(everything)]
    # the runner-up's evidence too, for evidence sheets, and nothing beyond the list
    listed = select_top(everything, METADATA.class_map, 6).classes[0].tolist()
    geometry = images[0].geometry
    slots = [class_evidence(listed[1], geometry, outputs.rows(0, 1), metadata) for outputs in (best, everything)]
    assert list(map(structs.asdict, slots[0])) == approx_slots(map(structs.asdict, slots[1]))
    with pytest.raises(ValueError, match="not among them"):
        class_evidence(listed[5], geometry, best.rows(0, 1), metadata)
    assert [len(record.top) for record in build_records(images, best, metadata, top=9)] == [5] * N


def approx_record(record):
    """Allow what depends on the norm, which a graph computes in float32, 1e-6; all else must be equal."""
    return approx(record, "margin") | {
        "prediction": approx(record["prediction"], "cosine"),
        "top": [approx(answer, "cosine") for answer in record["top"]],
        "evidence": approx_slots(record["evidence"]),
    }


def approx_slots(slots):
    return [approx(slot, "contribution") for slot in slots]


def approx(document, key):
    return {**document, key: pytest.approx(document[key], abs=1e-6)}
