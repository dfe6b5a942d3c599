"""The closed forms of the six distances against their definitions, written out in float64."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opal_deploy.artifact.class_map import ClassMap
from opal_deploy.artifact.opal_head import head_constant
from opal_deploy.model.config import DISTANCES
from opal_deploy.model.head import compute_distances
from tests.builders import build_anchors

# of z and the anchors a, float64 [N, C, K]
DEFINITIONS = {
    "l1": lambda z, a: (z - a).abs().sum(2),
    "l2": lambda z, a: (z - a).pow(2).sum(2).sqrt(),
    "l3": lambda z, a: (z - a).abs().pow(3).sum(2).pow(1 / 3),
    "linf": lambda z, a: (z - a).abs().amax(2),
    "kl": lambda z, a: (z * ((z + 1e-8).log() - (a + 1e-8).log())).sum(2),
    "tropical": lambda z, a: (z - a).amax(2) - (z - a).amin(2),
}
# two close numbers are compared before the root, which magnifies their rounding
POWERS = {"l2": 2, "l3": 3}
# kl sums logarithms down to log(1e-8) = -18
TOLERANCES = {"kl": 2e-5}
each_distance = pytest.mark.parametrize("distance", DISTANCES)


def definition(z, num_classes, m, distance):
    """Return distances float64 [N, C] from the explicit [N, C, K] differences."""
    return DEFINITIONS[distance](z.double()[:, None, :], build_anchors(num_classes, m, torch.float64)[None])


def distances(z, m, distance):
    constant = head_constant(ClassMap.blocks(z.shape[1] // m, m), distance)
    return compute_distances(z, torch.from_numpy(constant).to(z.dtype), m, distance)


def unit(rows):
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def softmax_scores(seed, n, k, gain):
    """Return non-negative unit rows, as channel-wise softmax and max pooling leave them."""
    noise = torch.randn(n, k, 6, generator=torch.Generator().manual_seed(seed))
    return unit((gain * noise).softmax(1).amax(2))


def assert_as_defined(z, num_classes, m, distance):
    ours, expected = distances(z, m, distance).double(), definition(z, num_classes, m, distance)
    power = POWERS.get(distance, 1)
    torch.testing.assert_close(ours**power, expected**power, rtol=2e-6, atol=TOLERANCES.get(distance, 2e-6))


@each_distance
@pytest.mark.parametrize(("num_classes", "m"), [(2, 1), (3, 2), (200, 5)])
class TestEmbeddingsOfASoftmax:
    def test_usual_and_peaked_ones_agree_with_the_definition(self, distance, num_classes, m):
        for gain in (0.01, 1.0, 10.0):
            assert_as_defined(softmax_scores(num_classes, 9, num_classes * m, gain), num_classes, m, distance)

    def test_saturated_and_nearly_saturated_agree(self, distance, num_classes, m):
        anchor = build_anchors(num_classes, m)[-20:]
        nearly = unit(anchor + 1e-5 * rand(*anchor.shape, seed=1))
        assert_as_defined(torch.cat([anchor, nearly]), num_classes, m, distance)
        assert distances(anchor, m, distance).argmin(1).tolist() == list(range(num_classes))[-20:]

    def test_ties_agree_with_the_definition(self, distance, num_classes, m):
        assert_as_defined(unit(torch.ones(1, num_classes * m)), num_classes, m, distance)
        # the largest value outside a block is then found in the other leader's
        z = torch.full((1, num_classes * m), 1e-3)
        z[0, 0] = z[0, m] = 0.7
        assert_as_defined(unit(z), num_classes, m, distance)


@pytest.mark.parametrize("distance", [d for d in DISTANCES if d != "kl"])
def test_embeddings_with_negative_entries_agree_with_the_definition(distance):
    # without the softmax; kl is refused there
    z = unit(torch.randn(16, 20, generator=torch.Generator().manual_seed(0)))
    assert_as_defined(z, 4, 5, distance)


@each_distance
@pytest.mark.parametrize("off", [0.0, 1e-7, 1e-3])
def test_gradients_are_finite_at_and_near_an_anchor(distance, off):
    z = (build_anchors(4, 5) + off * rand(4, 20)).requires_grad_(True)
    distances(z, 5, distance).sum().backward()
    assert torch.isfinite(z.grad).all()


@each_distance
def test_gradients_agree_with_the_definitions_away_from_anchors(distance):
    # with respect to the scores before they are normalised: only there is 2 - 2 cos the squared distance
    scores = 3.0 * softmax_scores(2, 4, 15, 3.0).double()
    ours, plain = scores.clone().requires_grad_(True), scores.clone().requires_grad_(True)
    weights = torch.linspace(-1, 1, 4 * 3, dtype=torch.float64).reshape(4, 3)
    (distances(unit(ours), 5, distance) * weights).sum().backward()
    (definition(unit(plain), 3, 5, distance) * weights).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-6, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """The size of the largest tensor that any operation makes, in elements."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return made


@each_distance
def test_no_tensor_of_forward_or_backward_is_larger_than_the_embedding(distance):
    n, num_classes, m = 64, 1000, 5
    z = softmax_scores(0, n, num_classes * m, 3.0).requires_grad_(True)
    with LargestTensor() as largest:
        distances(z, m, distance).sum().backward()
    assert largest.elements <= n * num_classes * m
