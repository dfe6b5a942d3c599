"""The class map in JavaScript: the same numbers as in numpy."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from opal_deploy.artifact.class_map import ClassMap, find_margins
from opal_deploy.artifact.opal_head import embedding_norms
from opal_deploy.visualization.pages import read_class_map_script

NODE = shutil.which("node")
SHARED = ClassMap.from_matrix(
    np.array([[0, 2.0, 0, 0.5, 0], [0.25, -1.0, 0, 0, 3.0], [0, 0, 1.5, 0, 0], [0, 0, 0, 0, 0]]),
    np.array([0.0, 0.5, -1.0, 2.0]),
)
EPSILON = 1e-8
RUN = """
const { map, scores, off, order } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const found = readClassMap(map, new Set(off)), norm = found.norm(scores, 1e-8), totals = found.totals(scores, norm);
console.log(JSON.stringify({
  norm, totals, margin: findMargin(totals, order), slots: map.biases.map((_, classId) => found.slots(classId)),
  owners: Array.from({ length: found.size }, (_, channel) => found.owners(channel)),
}));
"""


@pytest.mark.skipif(NODE is None, reason="Node.js is not installed")
@pytest.mark.parametrize(
    ("class_map", "off"),
    [(ClassMap.blocks(4, 5), []), (ClassMap.blocks(3, 2, (1,)), [4]), (SHARED, []), (SHARED, [1])],
    ids=["blocks", "slots dropped and switched off", "shared", "shared, one switched off"],
)
def test_totals_contributions_and_margins_are_those_of_numpy(class_map, off, tmp_path):
    scores = np.random.default_rng(0).random((1, class_map.num_prototypes), np.float32)
    left = class_map.drop(off)
    norms = embedding_norms(scores * left.kept_prototypes, EPSILON)
    totals = left.all_totals(scores / norms)
    order = np.argsort(-totals, kind="stable")
    (tmp_path / "run.js").write_text(read_class_map_script() + RUN, encoding="utf-8")
    given = {"map": class_map.to_dict(), "scores": scores[0].tolist(), "off": off, "order": order[0].tolist()}
    done = subprocess.run(
        [NODE, tmp_path / "run.js"], input=json.dumps(given), capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)
    assert found["norm"] == pytest.approx(norms[0], rel=1e-12)
    assert found["totals"] == pytest.approx(totals[0].tolist(), rel=1e-12, abs=1e-12)
    margins = find_margins(np.take_along_axis(totals, order, axis=1))
    assert found["margin"] == pytest.approx(margins[0], abs=1e-12)
    for class_id, slots in enumerate(found["slots"]):
        assert [slot["slot"] for slot in slots] == left.slots(class_id)
        assert [slot["channel"] for slot in slots] == left.channels(class_id).tolist()
        assert [slot["weight"] for slot in slots] == pytest.approx(left.weights[class_id, left.slots(class_id)])
    assert [[tuple(owner) for owner in owners] for owners in found["owners"]] == [
        class_map.owners(channel) for channel in range(class_map.num_prototypes)
    ]
