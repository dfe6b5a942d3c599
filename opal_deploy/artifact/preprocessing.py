"""Resize rules: how an image becomes a model's input, and the presets that name how other people's models expect it.

A model's metadata names its rule in one word, `KIND[-SIZE]-FILTER`:

    squash-bilinear                straight to the input size, aspect ratio not kept (OPAL's authors)
    shortest_edge-256-bilinear     the shorter side to 256 pixels, then the middle of the input size (torchvision, timm,
                                   Hugging Face, Ultralytics)
    letterbox-bilinear             whole, as large as fits, between bars of the grey 114 (Ultralytics' detectors)

Filters are Pillow's, antialiased. Sides are rounded as in torchvision.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from opal_deploy.errors import UsageError

Kind = Literal["squash", "shortest_edge", "letterbox"]
Filter = Literal["bilinear", "bicubic"]
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CAFFE = (123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3
_PLAIN, _HALF = ((0.0,) * 3, (1.0,) * 3), ((0.5,) * 3, (0.5,) * 3)
# Pillow's numbers of filters in Hugging Face's files
_RESAMPLE: dict[Any, Filter] = {2: "bilinear", 3: "bicubic"}


class View(NamedTuple):
    """What a rule makes of an image: its new (width, height), and the corner (x, y) of the input, below 0 in bars."""

    size: tuple[int, int]
    corner: tuple[int, int]


@dataclass(frozen=True)
class ResizeRule:
    """A resize rule; `short` is the length of the shorter side, 0 for other rules than `shortest_edge`."""

    kind: Kind = "squash"
    filter: Filter = "bilinear"
    short: int = 0

    @staticmethod
    def parse(text: str) -> ResizeRule:
        """Return the rule of a model's metadata; raise ValueError for an unknown one."""
        match = re.fullmatch(r"(squash|letterbox|shortest_edge)(?:-([1-9]\d{0,4}))?-(bilinear|bicubic)", text)
        if match is None or (match[1] == "shortest_edge") != (match[2] is not None):
            raise ValueError(f"resize rule {text[:40]!r} is not known")
        return ResizeRule(cast(Kind, match[1]), cast(Filter, match[3]), int(match[2] or 0))

    def __str__(self) -> str:
        """Return the rule as metadata names it."""
        return f"{self.kind}{f'-{self.short}' if self.short else ''}-{self.filter}"

    def fit(self, size: tuple[int, int], input_size: tuple[int, int]) -> View:
        """Return the view of an image of `size` = (width, height) for an input of (H0, W0)."""
        height, width = input_size
        if self.kind == "squash":
            return View((width, height), (0, 0))
        if self.kind == "letterbox":
            scale = min(width / size[0], height / size[1])
            fitted = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
            return View(fitted, (-((width - fitted[0]) // 2), -((height - fitted[1]) // 2)))
        # as torchvision: the longer side is truncated, the corner rounded
        short, long = min(size), max(size)
        longer = int(self.short * long / short)
        resized = (self.short, longer) if size[0] <= size[1] else (longer, self.short)
        return View(resized, (round((resized[0] - width) / 2), round((resized[1] - height) / 2)))


class InputForm(NamedTuple):
    """The form of a model's input: (H0, W0) and the resize rule."""

    height: int
    width: int
    rule: ResizeRule = ResizeRule()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, (H0, W0)."""
        return self.height, self.width


@dataclass(frozen=True)
class Preprocessing:
    """How photographs become the input of somebody's classifier.

    Attributes:
        rule: the resize rule; None: shorter side to the input's side.
        mean, std: of pixels scaled to [0, 1], per channel R, G, B.
        size: the input's side, where a file states it.
        is_bgr: whether the classifier takes channels in the order B, G, R.
    """

    rule: ResizeRule | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None = None
    is_bgr: bool = False


PRESETS: dict[str, Preprocessing] = {
    "torchvision": Preprocessing(ResizeRule("shortest_edge", "bilinear", 256), *_IMAGENET),
    "timm": Preprocessing(ResizeRule("shortest_edge", "bicubic", 256), *_IMAGENET),
    "ultralytics": Preprocessing(None, *_PLAIN),
    "letterbox": Preprocessing(ResizeRule("letterbox"), *_PLAIN),
    "stretch": Preprocessing(ResizeRule(), *_IMAGENET),
    "keras-tf": Preprocessing(ResizeRule(), *_HALF),
    "keras-caffe": Preprocessing(ResizeRule(), *_CAFFE, is_bgr=True),
    "keras-255": Preprocessing(ResizeRule(), (0.0,) * 3, (1 / 255,) * 3),
    "raw": Preprocessing(ResizeRule(), *_PLAIN),
}


def read_preprocessing(name: str) -> Preprocessing:
    """Return a preset, or what a JSON file says: timm's config.json, or Hugging Face's preprocessor_config.json.

    Raises:
        UsageError: no such preset or file, or the file states something that no rule does.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        raise UsageError(f"--preprocess {name}: expected one of {', '.join(PRESETS)}, or a .json file")
    try:
        raw = json.loads(path.read_text("utf-8"))
        return from_config(raw.get("pretrained_cfg", raw))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"--preprocess {name}: not a file of timm or Hugging Face ({error})") from None


def from_config(raw: dict[str, Any]) -> Preprocessing:
    """Return what timm's `pretrained_cfg` or Hugging Face's image processor says; raise ValueError, KeyError, ..."""
    if "input_size" in raw:
        side, mode = int(raw["input_size"][-1]), raw.get("crop_mode", "center")
        if mode not in ("center", "squash"):
            raise ValueError(f"crop_mode {mode!r} is not known")
        kind: Filter = "bicubic" if raw.get("interpolation", "bicubic") == "bicubic" else "bilinear"
        rule = ResizeRule("shortest_edge", kind, int(side / raw.get("crop_pct", 0.875)))
        return Preprocessing(
            ResizeRule("squash", kind) if mode == "squash" else rule, tuple(raw["mean"]), tuple(raw["std"]), side
        )
    size, crop = raw["size"], raw.get("crop_size") if raw.get("do_center_crop") else None
    if (resample := raw.get("resample", 2)) not in _RESAMPLE:
        raise ValueError(f"resample {resample!r} found, expected 2 (bilinear) or 3 (bicubic)")
    kind = _RESAMPLE[resample]
    mean, std = (raw["image_mean"], raw["image_std"]) if raw.get("do_normalize", True) else _PLAIN
    scale = 255 * raw.get("rescale_factor", 1 / 255)
    mean, std = (tuple(value / scale for value in values) for values in (mean, std))
    sides = size
    if isinstance(size, int):
        # older files
        sides = {"shortest_edge": size} if crop or "crop_pct" in raw else {"height": size}
    if "shortest_edge" in sides:
        short = int(sides["shortest_edge"])
        if crop is None and "crop_pct" in raw:  # ConvNeXt's processor, which squashes large images
            rule = ResizeRule("shortest_edge", kind, int(short / raw["crop_pct"]))
            return Preprocessing(rule if short < 384 else ResizeRule("squash", kind), mean, std, short)
        side = short if crop is None else int(crop if isinstance(crop, int) else crop["height"])
        return Preprocessing(ResizeRule("shortest_edge", kind, short), mean, std, side)
    return Preprocessing(ResizeRule("squash", kind), mean, std, int(sides["height"]))
