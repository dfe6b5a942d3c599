"""The head: which variants there are, what they answer, and the numbers they are made of."""

import pytest
import torch

from opal_deploy.errors import UsageError
from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig, NetworkConfig
from opal_deploy.model.head import OpalHead
from tests.builders import build_anchors

# the rows of the paper's Table 4, top to bottom: projection, max pooling, CWS, anchors; and their evidence
TABLE = "0000 none 1000 none 0100 none 0010 none 1100 none 0110 none 1010 none 1001 map 1101 exact 1011 map 1111 exact"
ABLATION = dict(zip(TABLE.split()[::2], TABLE.split()[1::2], strict=True))
OTHERS = sorted({f"{row:04b}" for row in range(16)} - ABLATION.keys())


def parts(row):
    projection, gmp, cws, anchors = (digit == "1" for digit in row)
    return {"projection": projection, "pooling": "max" if gmp else "avg", "cws": cws, "anchors": anchors}


class TestVariants:
    @pytest.mark.parametrize(("row", "evidence"), ABLATION.items())
    def test_a_row_of_the_ablation_table_has_the_outputs_of_its_evidence(self, row, evidence):
        config = HeadConfig(**parts(row), prototypes_per_class=2)
        assert config.evidence == evidence
        head, features = OpalHead(6, 3, config), torch.rand(4, 6, 2, 5)
        outputs = head.explain(head.project(features))
        assert outputs.logits.shape == (4, 3)
        torch.testing.assert_close(head(features), outputs.logits, rtol=0, atol=0)
        if evidence == "none":
            assert (outputs.scores, outputs.argmax, outputs.attention) == (None, None, None)
        else:
            assert (outputs.scores.shape, outputs.argmax.shape) == ((4, 6), (4, 6))
            assert outputs.attention.shape == (4, 6, 2, 5)
            assert outputs.argmax.dtype == torch.int32

    @pytest.mark.parametrize("row", OTHERS)
    def test_any_other_combination_is_refused_in_one_line(self, row):
        assert len(OTHERS) == 5
        with pytest.raises(UsageError, match=r"\A.+\Z"):
            HeadConfig(**parts(row))

    def test_a_part_that_does_not_exist_is_refused(self):
        wrong = {"pooling": "median"}, {"distance": "l4"}, {"prototypes_per_class": 0}, {"distance": "kl", "cws": False}
        for parts_of_head in wrong:
            with pytest.raises(UsageError):
                HeadConfig(**parts_of_head)
        with pytest.raises(UsageError, match="at least 2"):
            NetworkConfig("resnet18", 1)


class TestForwardPass:
    def test_a_score_is_the_attention_at_its_cell_and_channels_sum_to_one(self):
        head = OpalHead(6, 3, HeadConfig())
        outputs = head.explain(head.project(torch.rand(2, 6, 3, 4)))
        torch.testing.assert_close(outputs.attention.sum(1), torch.ones(2, 3, 4))
        at_cell = outputs.attention.flatten(2).gather(2, outputs.argmax.long()[..., None]).squeeze(2)
        torch.testing.assert_close(outputs.scores, at_cell, rtol=0, atol=0)

    def test_a_cell_is_row_times_width_plus_column_and_the_lowest_of_equals(self):
        head = OpalHead(6, 2, HeadConfig(prototypes_per_class=1))
        projected = torch.zeros(1, 2, 3, 4)
        assert head.explain(projected).argmax.tolist() == [[0, 0]]
        projected[0, 0, 2, 1] = 5.0
        assert head.explain(projected).argmax[0, 0] == 2 * 4 + 1

    def test_contributions_of_a_class_add_up_to_its_cosine(self):
        # the explanation is the computation
        head = OpalHead(6, 3, HeadConfig())
        outputs = head.explain(head.project(torch.rand(4, 6, 2, 5)))
        z = (outputs.scores / outputs.scores.norm(dim=1, keepdim=True)).double()
        cosine = z @ build_anchors(3, 5, torch.float64).T
        torch.testing.assert_close(-(2 - 2 * cosine).sqrt(), outputs.logits.double(), rtol=1e-6, atol=1e-6)

    def test_epsilon_is_added_to_the_norm(self):
        head = OpalHead(6, 2, HeadConfig(prototypes_per_class=1, distance="l1", epsilon=1.0))
        # z = (3, 4) / (5 + 1); |z - a_0| = |0.5 - 1| + 4/6
        logits = head.classify(torch.tensor([[3.0, 4.0]]))
        torch.testing.assert_close(logits, -torch.tensor([[0.5 + 4 / 6, 0.5 + abs(4 / 6 - 1)]]))

    def test_the_linear_baseline_normalises_its_pooled_features(self):
        head = OpalHead(6, 3, LINEAR_BASELINE)
        features = torch.rand(2, 6, 3, 4)
        torch.testing.assert_close(head(features), head(7.0 * features))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_everything_after_the_projection_is_float32(self, dtype):
        head = OpalHead(6, 3, HeadConfig()).to(dtype)
        assert head.project(torch.rand(1, 6, 2, 2, dtype=dtype)).dtype == torch.float32
        assert head(torch.rand(1, 6, 2, 2, dtype=dtype)).dtype == torch.float32


def test_the_head_never_holds_anchors_among_its_parameters_or_buffers():
    assert set(OpalHead(6, 3, HeadConfig(distance="l1")).state_dict()) == {"projection.weight", "projection.bias"}
