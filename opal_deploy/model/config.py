"""The configuration of an OPAL network, as plain data: importing this module does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from opal_deploy.artifact.metadata import IMAGENET_MEAN, IMAGENET_STD, Evidence
from opal_deploy.errors import UsageError

Pooling = Literal["max", "avg"]
Distance = Literal["l1", "l2", "l3", "linf", "kl", "tropical"]
HeadKind = Literal["opal", "linear", "plain"]
DISTANCES: tuple[str, ...] = get_args(Distance)

PAPER_PROTOTYPES = 5
EPSILON = 1e-8


@dataclass(frozen=True)
class HeadConfig:
    """The head's four parts that the paper's ablation switches (Table 4), m, and the distance (Supp. E.1).

    Only the paper's eleven combinations, and the network's own classifier, are accepted; all others raise UsageError.

    Attributes:
        projection: 1x1 convolution from D to K = C * m channels.
        cws: channel-wise softmax over K at each cell (Eq. 2).
        pooling: `max` (Eq. 3) or `avg` over cells.
        anchors: orthonormal class anchors (Eq. 1); without them a dense layer follows.
        prototypes_per_class: m, at least 1.
        distance: one of `DISTANCES`; used with anchors only.
        epsilon: added to the norm, z = s / (|s| + epsilon), as in the authors' code.
        plain: the network's own classifier instead of all of these, as its library has it: pooling, the layers behind
            it, and a dense layer to C classes; nothing is normalised to length 1.
    """

    projection: bool = True
    cws: bool = True
    pooling: Pooling = "max"
    anchors: bool = True
    prototypes_per_class: int = PAPER_PROTOTYPES
    distance: Distance = "l2"
    epsilon: float = EPSILON
    plain: bool = False

    def __post_init__(self) -> None:
        if self.pooling not in ("max", "avg"):
            raise UsageError(f"pooling {self.pooling!r}: expected max or avg")
        if self.distance not in DISTANCES:
            raise UsageError(f"distance {self.distance!r}: expected one of {', '.join(DISTANCES)}")
        if self.prototypes_per_class < 1:
            raise UsageError(f"{self.prototypes_per_class} prototypes per class: expected at least 1")
        if self.plain and (self.projection or self.cws or self.anchors or self.pooling != "avg"):
            raise UsageError("the network's own classifier has no projection, CWS, anchors or pooling of ours")
        if self.anchors and not self.projection:
            raise UsageError(
                "anchors without projection: they live in K = C*m channels, which only the projection makes; "
                "switch the projection on or the anchors off"
            )
        if self.projection and self.cws and self.pooling == "max" and not self.anchors:
            raise UsageError(
                "projection, CWS and max pooling without anchors is not one of the paper's eleven variants; "
                "switch the anchors on (OPAL) or one of the three off"
            )
        if self.anchors and self.distance == "kl" and not self.cws:
            raise UsageError(
                "distance kl without CWS: it takes the logarithm of the embedding, which is negative in places "
                "without the softmax; use CWS or another distance"
            )

    @property
    def evidence(self) -> Evidence:
        """The evidence that the head gives: `exact` (one cell a slot), `map` (an average over cells) or `none`."""
        if not self.anchors:
            return "none"
        return "exact" if self.pooling == "max" else "map"

    @property
    def kind(self) -> HeadKind:
        """The name on the command line: `plain`, `linear`, or `opal` for OPAL and its ablated variants."""
        if self.plain:
            return "plain"
        is_opal = self.projection or self.cws or self.anchors or self.pooling == "max"
        return "opal" if is_opal else "linear"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for metadata and checkpoints."""
        return asdict(self)


def require_stride(stride: int | None, keep_layers: bool) -> None:
    """Raise UsageError where all layers are to be kept at a stride that was not given."""
    if keep_layers and stride is None:
        raise UsageError(
            "--keep-layers without --stride: a network that is not cut keeps all of its layers; give --stride 16 or 8 "
            "for finer cells, or leave --keep-layers out"
        )


# the paper's: a dense layer on average-pooled features of length 1, as the authors' code normalises them
LINEAR_BASELINE = HeadConfig(projection=False, cws=False, pooling="avg", anchors=False)
# what everybody fine-tunes: the library's own network with another number of classes
PLAIN_CLASSIFIER = HeadConfig(projection=False, cws=False, pooling="avg", anchors=False, plain=True)


@dataclass(frozen=True)
class PretrainedConfig:
    """How a backbone's weights were made, as far as its library says.

    Attributes:
        mean, std: per channel R, G, B, of pixels scaled to [0, 1].
        details: licence, interpolation, crop and the like, for records; empty where the library says nothing.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkConfig:
    """The configuration of a whole network.

    Attributes:
        backbone: torchvision's name, such as `convnext_tiny`, or timm's after `timm:`.
        num_classes: C, at least 2.
        input_size: (H0, W0) in pixels, multiples of the backbone's stride.
        head: the configuration of the head.
        stride: input pixels per cell, at which the backbone is cut; None keeps all of its layers before the global
            pooling (32 for the paper's nine).
        keep_layers: reach `stride` with all layers: those that would coarsen the feature map further get stride 1.
        mean, std: per channel R, G, B, of pixels scaled to [0, 1], which images are normalised with.
    """

    backbone: str
    num_classes: int
    input_size: tuple[int, int] = (224, 224)
    head: HeadConfig = field(default_factory=HeadConfig)
    stride: int | None = None
    keep_layers: bool = False
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise UsageError(f"{self.num_classes} class(es): a classifier needs at least 2")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for checkpoints; `from_dict` reads them."""
        return asdict(self)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> NetworkConfig:
        """Build the configuration that `to_dict` wrote.

        Raises:
            KeyError, TypeError: not a dictionary of `to_dict`.
        """
        size = raw["input_size"]
        return NetworkConfig(
            backbone=str(raw["backbone"]),
            num_classes=int(raw["num_classes"]),
            input_size=(int(size[0]), int(size[1])),
            head=HeadConfig(**raw["head"]),
            stride=raw["stride"],
            keep_layers=bool(raw["keep_layers"]),
            mean=tuple(raw["mean"]),
            std=tuple(raw["std"]),
        )
