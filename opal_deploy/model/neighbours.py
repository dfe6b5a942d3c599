"""The OOD score of an image: how far its features are from those of the training images.

Features are pooled over the cells and compared by the cosine in a space in which the spread within classes is the same
in all directions, as in linear discriminant analysis: there, differences between classes count most. The similarity is
the mean cosine to the five nearest training images (as Sun, Ming, Zhu and Li, "Out-of-distribution detection with deep
nearest neighbors", ICML 2022, take the k-th nearest of plain features); the OOD score is 1 minus that, in [0, 2].
docs/reference/measurements-unknown.md compares it with the alternatives.

Out-of-distribution images may be kept as well. An image that is nearer to the five nearest of them than to the training
images scores higher by twice the difference, so that the range is [0, 6]; all others score as without them.

The covariance within classes is S = U diag(w) U' + v (I - U U'), of rank r and with equal variance v in the other
directions (probabilistic PCA), after shrinkage towards its mean variance. Nothing needs a D x D matrix.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# nearest training images that are averaged over
NUM_NEAREST = 5
# training images that are kept, evenly over classes, more if classes would have fewer than five; and background images
MAX_IMAGES = 2_000
# directions with a variance of their own
_RANK = 64
# weight of the mean variance relative to the measured covariance
_SHRINKAGE = 1.0
# weight of the difference between the similarity to background and to training images; measured
_BACKGROUND_WEIGHT = 2.0
_TINY = 1e-12
_TENSORS = ("mean", "basis", "bank", "background")


class Neighbours(nn.Module):
    """Features of training images, to which others are compared.

    Attributes:
        mean: float32 [D], of the training features.
        basis: float32 [D, r], B = U sqrt(1 - v / w), so that v S^-1 = I - B B'.
        bank: float32 [D, M], S^-1 (t - mean) of each training image, scaled so that its product with x - mean is the
            cosine times the length of x - mean.
        background: float32 [D, B], the same of each out-of-distribution image; B is 0, or at least 5.
    """

    mean: Tensor
    basis: Tensor
    bank: Tensor
    background: Tensor

    def __init__(self, mean: Tensor, basis: Tensor, bank: Tensor, background: Tensor) -> None:
        super().__init__()
        for name, tensor in zip(_TENSORS, (mean, basis, bank, background), strict=True):
            # checkpoints keep them next to the state dict, which holds what was learned
            self.register_buffer(name, tensor.float().contiguous(), persistent=False)

    @property
    def num_background(self) -> int:
        """The number of out-of-distribution images, B."""
        return self.background.shape[1]

    @staticmethod
    def fit(features: Tensor, labels: Tensor, background: Tensor | None = None) -> Neighbours | None:
        """Return the neighbours for pooled features of training images.

        None where they have no spread within classes: too few images, or dead features.

        Args:
            features: [M, D].
            labels: int64 [M].
            background: [B, D], of at least five out-of-distribution images.
        """
        features = features.double()
        mean = features.mean(0)
        counts = labels.bincount()
        sums = torch.zeros(len(counts), features.shape[1], dtype=features.dtype).index_add_(0, labels, features)
        spread = features - (sums / counts.clamp_min(1)[:, None])[labels]
        variance = float((spread**2).sum() / spread.numel())
        if len(features) < NUM_NEAREST or not variance > _TINY:
            return None
        _, values, directions = torch.linalg.svd(spread / len(spread) ** 0.5, full_matrices=False)
        rank = min(_RANK, len(values), features.shape[1] - 1)
        measured = values[:rank] ** 2
        others = (variance * features.shape[1] - float(measured.sum())) / (features.shape[1] - rank)
        own, rest = measured + _SHRINKAGE * variance, others + _SHRINKAGE * variance
        basis = directions[:rank].T * (1.0 - rest / own).clamp_min(0.0).sqrt()
        background = features[:0] if background is None else background.double()
        return Neighbours(mean, basis, *(_whiten(images - mean, basis).T for images in (features, background)))

    @staticmethod
    def from_dict(tensors: Mapping[str, Tensor], num_features: int, num_classes: int) -> Neighbours | None:
        """Return the neighbours that `to_dict` wrote; None for an empty dictionary, ValueError for other tensors.

        `background` is missing where there are no such images.
        """
        if not tensors:
            return None
        tensors = {"background": torch.zeros(num_features, 0), **tensors}
        shapes = [tuple(tensors[name].shape) for name in _TENSORS]
        rank, images, others = (shape[-1] for shape in shapes[1:])
        expected = [(num_features,), *((num_features, size) for size in (rank, images, others))]
        fits = NUM_NEAREST <= images <= max_images(num_classes) and (not others or NUM_NEAREST <= others <= MAX_IMAGES)
        if shapes != expected or rank > num_features or not fits:
            raise ValueError(f"neighbours of shapes {shapes}")
        for name in _TENSORS:
            tensor = tensors[name]
            if tensor.layout != torch.strided or not tensor.is_floating_point() or not tensor.float().isfinite().all():
                raise ValueError(f"neighbours whose {name} is not of finite numbers")
        return Neighbours(*(tensors[name] for name in _TENSORS))

    def to_dict(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint."""
        return {name: getattr(self, name).cpu() for name in _TENSORS}

    def forward(self, features: Tensor) -> Tensor:
        """Return the OOD score, float32 [N], for features [N, D, H, W]."""
        exact = features if features.dtype == torch.float64 else features.float()
        centred = exact.mean((2, 3)) - self.mean
        length = _length(centred, self.basis)
        known = _mean_of_nearest(centred @ self.bank / length)
        if not self.num_background:
            return 1.0 - known
        other = _mean_of_nearest(centred @ self.background / length)
        return 1.0 - known + _BACKGROUND_WEIGHT * (other - known).relu()


def max_images(num_classes: int) -> int:
    """Return how many training images are kept at most: enough that the nearest five can be of one class."""
    return max(MAX_IMAGES, NUM_NEAREST * num_classes)


def _mean_of_nearest(cosines: Tensor) -> Tensor:
    return cosines.topk(NUM_NEAREST, dim=1).values.mean(1)


def _whiten(centred: Tensor, basis: Tensor) -> Tensor:
    """Return S^-1 (x - mean) [N, D] over the length of x - mean, up to a factor."""
    return (centred - (centred @ basis) @ basis.T) / _length(centred, basis)


def _length(centred: Tensor, basis: Tensor) -> Tensor:
    """Return the length of x - mean [N, D] by S^-1, in units of 1 / sqrt(v): [N, 1]."""
    squares = (centred * centred).sum(1, keepdim=True) - ((centred @ basis) ** 2).sum(1, keepdim=True)
    return squares.clamp_min(_TINY).sqrt()
