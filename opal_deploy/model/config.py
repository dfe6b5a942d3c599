"""The configuration of an OPAL network, as plain data: importing this module does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from opal_deploy.artifact.documents import SHORT, AtLeastOne, Count, Distance, Number, check_document
from opal_deploy.artifact.metadata import DISTANCES, IMAGENET_MEAN, IMAGENET_STD, Channels, Evidence, Prototypes, Side
from opal_deploy.artifact.preprocessing import InputForm, ResizeRule
from opal_deploy.errors import UsageError

if TYPE_CHECKING:
    from opal_deploy.artifact.class_map import ClassMap

Pooling = Literal["max", "avg"]
HeadKind = Literal["opal", "linear", "plain"]

PAPER_PROTOTYPES = 5
EPSILON = 1e-8


@dataclass(frozen=True)
class HeadConfig:
    """The four parts of the paper's ablation (Table 4), m, and the distance (Supp. E.1).

    Any combination except the paper's eleven and the network's own classifier raises UsageError.

    Attributes:
        projection: 1x1 convolution from D to K = C * m channels.
        cws: channel-wise softmax over K at each cell (Eq. 2).
        pooling: `max` (Eq. 3) or `avg` over cells.
        anchors: orthonormal class anchors (Eq. 1); without them, a dense layer.
        prototypes_per_class: m, at least 1.
        distance: one of `DISTANCES`, to the anchors.
        epsilon: added to the norm, z = s / (|s| + epsilon), as in the authors' code.
        plain: the network's own classifier instead of all of these: pooling, the layers after it, and a dense layer to
            C classes; nothing is normalised to length 1.
        dropped: channels of the slots that `edit` dropped, see `ClassMap`; only with max pooling and anchors.
    """

    projection: bool = True
    cws: bool = True
    pooling: Pooling = "max"
    anchors: bool = True
    prototypes_per_class: Prototypes = PAPER_PROTOTYPES
    distance: Distance = "l2"
    epsilon: Number = EPSILON
    plain: bool = False
    dropped: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.pooling not in ("max", "avg"):
            raise UsageError(f"pooling {self.pooling!r}: expected max or avg")
        if self.distance not in DISTANCES:
            raise UsageError(f"distance {self.distance!r}: expected one of {', '.join(DISTANCES)}")
        if self.prototypes_per_class < 1:
            raise UsageError(f"{self.prototypes_per_class} prototypes per class: expected at least 1")
        if self.plain and (self.projection or self.cws or self.anchors or self.pooling != "avg"):
            raise UsageError("the network's own classifier takes no projection, CWS, anchors or max pooling")
        if self.anchors and not self.projection:
            raise UsageError("anchors need a projection; switch the projection on, or the anchors off")
        if self.projection and self.cws and self.pooling == "max" and not self.anchors:
            raise UsageError("projection, CWS and max pooling need anchors; switch them on, or one of the three off")
        if self.dropped and self.evidence != "exact":
            raise UsageError("only slots whose score comes from one cell can be dropped: max pooling and anchors")
        if self.anchors and self.distance == "kl" and not self.cws:
            raise UsageError("distance kl takes logarithms, which need CWS; use CWS or another distance")

    @property
    def evidence(self) -> Evidence:
        """The head's evidence: `exact` (one cell per slot), `map` (an average over cells) or `none`."""
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

    def class_map(self, num_classes: int) -> ClassMap:
        """Return the map of a head with this number of classes."""
        # needs numpy, which the command line does without
        from opal_deploy.artifact.class_map import ClassMap

        return ClassMap.blocks(num_classes, self.prototypes_per_class, self.dropped)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for metadata and checkpoints; `from_dict` reads them."""
        return {**asdict(self), "dropped": list(self.dropped)}

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> HeadConfig:
        """Build the configuration that `to_dict` wrote; raise ArtifactError for another dictionary."""
        return check_document(raw, HeadConfig, "head")


def require_stride(stride: int | None, keep_layers: bool) -> None:
    """Raise UsageError if all layers are to be kept without a stride."""
    if keep_layers and stride is None:
        raise UsageError("--keep-layers: only with --stride 16 or 8, for finer cells; leave it out, or give both")


def check_tiling(backbone: str, input_size: tuple[int, int], stride: int) -> None:
    """Raise UsageError unless cells of `stride` pixels tile an input of (H0, W0)."""
    height, width = input_size
    if height < stride or width < stride or height % stride or width % stride:
        raise UsageError(f"input size {height}x{width}: {backbone} needs multiples of its stride {stride}")


# the paper's: a dense layer on average-pooled features, normalised to length 1 as in the authors' code
LINEAR_BASELINE = HeadConfig(projection=False, cws=False, pooling="avg", anchors=False)
# the usual fine-tuning: the library's own network with another number of classes
PLAIN_CLASSIFIER = HeadConfig(projection=False, cws=False, pooling="avg", anchors=False, plain=True)


@dataclass(frozen=True)
class PretrainedConfig:
    """How a backbone's weights were made, according to its library.

    Attributes:
        mean, std: per channel R, G, B, of pixels scaled to [0, 1].
        details: licence, interpolation, crop and the like, for records.
    """

    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NetworkConfig:
    """The configuration of a whole network.

    Attributes:
        backbone: a torchvision name, such as `convnext_tiny`, or `timm:` and a timm name.
        num_classes: C, at least 2.
        input_size: (H0, W0) in pixels, multiples of the backbone's stride.
        head: the configuration of the head.
        stride, keep_layers: see `backbones.build`.
        mean, std: per channel R, G, B, of pixels scaled to [0, 1], for normalising images.
        resize: how an image becomes H0 x W0, see `ResizeRule`.
    """

    backbone: str
    num_classes: int
    input_size: tuple[Side, Side] = (224, 224)
    head: HeadConfig = field(default_factory=HeadConfig)
    stride: AtLeastOne | None = None
    keep_layers: bool = False
    mean: Channels = IMAGENET_MEAN
    std: Channels = IMAGENET_STD
    resize: str = "squash-bilinear"

    def __post_init__(self) -> None:
        if self.num_classes < 2:
            raise UsageError(f"{self.num_classes} class(es): a classifier needs at least 2")
        prototypes = self.num_classes * self.head.prototypes_per_class
        if max(self.head.dropped, default=0) >= prototypes:
            raise UsageError(f"dropped slots {SHORT.repr(self.head.dropped)}: expected channels below {prototypes}")
        ResizeRule.parse(self.resize)

    @property
    def form(self) -> InputForm:
        """The form of the input: its size and the resize rule."""
        return InputForm(*self.input_size, ResizeRule.parse(self.resize))

    @cached_property
    def class_map(self) -> ClassMap:
        """The map from classes to prototypes."""
        return self.head.class_map(self.num_classes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for checkpoints; `from_dict` reads them."""
        return {**asdict(self), "head": self.head.to_dict()}

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> NetworkConfig:
        """Build the configuration that `to_dict` wrote, in this or an earlier version; ArtifactError for any other."""
        return check_document(raw, NetworkConfig, "config")


def find_unknown_settings(raw: dict[str, Any]) -> list[str]:
    """Return the keys of a stored configuration that this version does not know and cannot leave out of a network."""
    known = NetworkConfig.__dataclass_fields__, HeadConfig.__dataclass_fields__
    return sorted({*(raw.keys() - known[0].keys()), *(raw["head"].keys() - known[1].keys())})
