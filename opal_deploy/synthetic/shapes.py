"""Shapes: the outlines of the variants of each part, the layers they are painted on, and the background.

A part's frame has its origin where the part meets the creature, x pointing outward and y pointing down for a part that
points right. Lengths are in image sides (the shorter one) for a creature of scale 1. The variants of one part cover
about the same area, so that the amount of a colour in an image does not tell its variant.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Color = tuple[int, int, int]
Pen = ImageDraw.ImageDraw
Rng = np.random.Generator
SUPERSAMPLING = 2

Points = NDArray[np.float64]
"""[P, 2] corners of a polygon, (x, y)."""

Frame = tuple[float, float, float]
"""A part's own frame of reference: x, y of its origin and the direction of its x axis in radians."""

TonedPolygon = tuple[Points, str]
"""A polygon and its tone: "fill" (outlined, the part's colour), "mark" (no outline, the part's second colour),
"base" (no outline, the part's colour again, to cut a hole into a mark) or "rib" (no outline, the outline's colour)."""


def ellipse(x: float, y: float, rx: float, ry: float, angle: float = 0.0, corners: int = 28) -> Points:
    """Return an ellipse [corners, 2] about (x, y) with half axes rx, ry, turned by `angle` radians."""
    t = np.linspace(0, 2 * math.pi, corners, endpoint=False)
    return place_in_frame(np.stack([rx * np.cos(t), ry * np.sin(t)], axis=1), (x, y, angle))


def rotate(points: Points, angle: float) -> Points:
    """Return `points` [P, 2] rotated about the origin by `angle` radians (from x towards y)."""
    c, s = math.cos(angle), math.sin(angle)
    return np.asarray(points @ np.array([[c, s], [-s, c]]), dtype=np.float64)


def place_in_frame(points: Points, frame: Frame) -> Points:
    """Return `points` [P, 2] of `frame` in the coordinates of the frame's origin."""
    return np.asarray(rotate(points, frame[2]) + np.array(frame[:2]), dtype=np.float64)


def ribbon(path: Points, start: float, end: float) -> Points:
    """Return the outline [2P, 2] of a stroke along `path` [P, 2], its width linear from `start` to `end`."""
    tangent = np.gradient(path, axis=0)
    tangent /= np.maximum(np.hypot(tangent[:, :1], tangent[:, 1:]), 1e-12)
    normal = np.stack([-tangent[:, 1], tangent[:, 0]], axis=1) * np.linspace(start / 2, end / 2, len(path))[:, None]
    return np.concatenate([path + normal, (path - normal)[::-1]])


def line(x0: float, y0: float, x1: float, y1: float, start: float, end: float) -> Points:
    """Return the outline [4, 2] of a straight stroke."""
    return ribbon(np.array([[x0, y0], [x1, y1]]), start, end)


def leaf(length: float, width: float, angle: float) -> Points:
    """Return a feather [24, 2] with a blunt tip, from the origin outward."""
    t = np.linspace(0, 1, 12)
    half = width / 2 * np.sin(math.pi * t**1.5) ** 0.7
    path = np.stack([length * t, np.zeros_like(t)], axis=1)
    side = np.stack([np.zeros_like(t), half], axis=1)
    return rotate(np.concatenate([path + side, (path - side)[::-1]]), angle)


def arc(radius: float, start: float, end: float, corners: int = 16) -> Points:
    """Return points [corners, 2] of a circle about the origin between two angles in radians."""
    t = np.linspace(start, end, corners)
    return np.stack([radius * np.cos(t), radius * np.sin(t)], axis=1)


def polygon(*corners: tuple[float, float]) -> Points:
    """Return (x, y) pairs as an array [P, 2]."""
    return np.array(corners, dtype=np.float64)


def _fill(*outlines: Points) -> list[TonedPolygon]:
    return [(outline, "fill") for outline in outlines]


def _draw_curl() -> Points:
    t = np.linspace(0, 1, 26)
    x = 0.098 - np.cos(t * 5.6) * 0.05 * (1 - 0.62 * t)
    swirl = np.stack([x, -np.sin(t * 5.6) * 0.056 * (1 - 0.6 * t)], axis=1)
    return ribbon(np.concatenate([polygon((-0.01, 0.012), (0.02, 0.006)), swirl]), 0.036, 0.026)


def _draw_wave() -> Points:
    x = np.linspace(-0.02, 0.19, 26)
    return ribbon(np.stack([x, 0.046 * np.sin(x * 42)], axis=1), 0.046, 0.03)


_HOOD = polygon((-0.015, -0.062), (0.03, -0.066), (0.065, -0.052), (0.09, -0.02), (0.096, 0.025), (0.082, 0.078))
_WING: TonedPolygon = (ellipse(0, 0, 0.122, 0.082, corners=36), "fill")
_BARS = ((-0.062, 0.05), (0.0, 0.064), (0.062, 0.05))
_SPOTS = ((-0.078, 0.0), (-0.026, -0.042), (-0.026, 0.04), (0.03, 0.0), (0.062, -0.04), (0.066, 0.036))
_TEETH = polygon((-0.1, 0.022), (-0.05, -0.04), (0.0, 0.034), (0.05, -0.04), (0.1, 0.022))
_UP, _DOWN = (place_in_frame(_TEETH, (0.0, shift, 0.0)) for shift in (0.018, -0.018))
_TINE = ribbon(np.array([[-0.02, 0.004], [0.07, 0.03], [0.13, 0.064], [0.19, 0.108]]), 0.055, 0.012)

POLYGONS: Mapping[str, Mapping[str, Sequence[TonedPolygon]]] = {
    "beak": {
        "cone": [
            *_fill(polygon((-0.015, -0.055), (0.13, 0.01), (-0.015, 0.06))),
            (line(0, 0.005, 0.1, 0.01, 0.008, 0.004), "rib"),
        ],
        "sickle": _fill(
            ribbon(place_in_frame(arc(0.15, -math.pi / 2, math.radians(10), 14), (-0.005, 0.14, 0.0)), 0.062, 0.008)
        ),
        "spoon": _fill(line(-0.015, 0, 0.1, 0, 0.034, 0.026), ellipse(0.125, 0.0, 0.045, 0.038)),
        "hook": _fill(np.concatenate([_HOOD, polygon((0.066, 0.03), (0.045, 0.016), (0.03, 0.03), (-0.015, 0.036))])),
    },
    "crest": {
        "fan": _fill(*(leaf(0.135, 0.036, math.radians(a)) for a in (-48, 48, 0))),
        "spike": _fill(polygon((-0.01, -0.045), (0.08, -0.03), (0.19, -0.035), (0.09, 0.025), (-0.01, 0.045))),
        "curl": _fill(_draw_curl()),
        "ball": _fill(line(-0.01, 0, 0.08, 0, 0.02, 0.016), ellipse(0.11, 0, 0.049, 0.049)),
    },
    "wing": {
        "bars": [_WING, *((line(x, -h, x, h, 0.026, 0.026), "mark") for x, h in _BARS)],
        "spots": [_WING, *((ellipse(x, y, 0.0205, 0.0205, corners=16), "mark") for x, y in _SPOTS)],
        "ring": [
            _WING,
            *((ellipse(0, 0, r, r), tone) for r, tone in ((0.064, "mark"), (0.042, "base"), (0.021, "mark"))),
        ],
        "zigzag": [_WING, (np.concatenate([_UP, _DOWN[::-1]]), "mark")],
    },
    "tail": {
        "paddle": [
            *_fill(ellipse(0.105, 0, 0.085, 0.044), line(-0.02, 0, 0.05, 0, 0.05, 0.04)),
            (line(0.0, 0, 0.15, 0, 0.008, 0.006), "rib"),
        ],
        "fork": _fill(_TINE, _TINE * np.array([1.0, -1.0])),
        "shell": [
            *_fill(np.concatenate([polygon((-0.02, 0.016), (-0.02, -0.016)), arc(0.128, -0.76, 0.76, 14)])),
            *((rotate(line(0.01, 0, 0.115, 0, 0.006, 0.008), a), "rib") for a in (-0.4, 0, 0.4)),
        ],
        "wave": _fill(_draw_wave()),
    },
    # x is forward along the ground, the origin at the ankle
    "feet": {
        "toes": _fill(
            *(
                ribbon(np.array([[0, 0], [math.cos(a) * 0.074, math.sin(a) * 0.074]]), 0.028, 0.018)
                for a in (2.5, 0.64, 1.57)
            )
        ),
        "flippers": _fill(polygon((-0.012, -0.012), (0.014, -0.012), (0.105, 0.032), (0.088, 0.05), (-0.02, 0.05))),
        "boots": _fill(
            polygon((-0.024, -0.03), (0.022, -0.03), (0.022, 0.008), (0.06, 0.016), (0.066, 0.052), (-0.024, 0.052))
        ),
        "balls": _fill(ellipse(0.004, 0.032, 0.041, 0.041, corners=20)),
    },
}
"""Part -> variant -> its polygons in painting order; of the feet, one foot. The first variant is the common one."""


def hsv_to_rgb(hue: float, saturation: float, value: float) -> Color:
    """Return RGB, 0 ... 255, of a hue (any number, period 1), a saturation and a value (both 0 ... 1)."""
    r, g, b = colorsys.hsv_to_rgb(hue % 1.0, saturation, value)
    return round(255 * r), round(255 * g), round(255 * b)


def blank_layer(size: tuple[int, int]) -> tuple[Image.Image, Pen]:
    """Return an empty supersampled layer for an image of `size` (H, W); its colours come from `premultiply`."""
    # four plain bands: colours are kept multiplied by their alpha, so shrinking needs no conversion
    layer = Image.new("CMYK", (size[1] * SUPERSAMPLING, size[0] * SUPERSAMPLING))
    return layer, ImageDraw.Draw(layer)


def premultiply(paint: Color, alpha: int = 255) -> tuple[int, int, int, int]:
    """Return a colour for a layer, multiplied by `alpha` (0 ... 255)."""
    r, g, b = paint
    return r * alpha // 255, g * alpha // 255, b * alpha // 255, alpha


def composite(layer: Image.Image) -> tuple[tuple[slice, slice], NDArray[np.float32], NDArray[np.float32]]:
    """Return a layer's painted region at the image's size, as rows and columns, colour and alpha.

    The colour is multiplied by alpha, float32 [h, w, 3], 0 ... 255; alpha is float32 [h, w, 1], 0 ... 1.
    """
    small = layer.reduce(SUPERSAMPLING)
    box = small.getbbox() or (0, 0, 1, 1)
    bands = np.asarray(small.crop(box)).astype(np.float32)
    return (slice(box[1], box[3]), slice(box[0], box[2])), bands[..., :3], bands[..., 3:] / np.float32(255)


def draw_background(rng: Rng, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw a scene of `size` = (H, W) without a creature, uint8 [H, W, 3], RGB.

    Hills, blades or drops on a gradient with soft colour noise, muted so that a creature stands out.
    """
    height, width = size
    side = min(size)
    hue = rng.uniform()
    top = np.array(hsv_to_rgb(hue, rng.uniform(0.08, 0.36), rng.uniform(0.62, 0.95)))
    bottom = np.array(hsv_to_rgb(hue + rng.normal(0, 0.12), rng.uniform(0.1, 0.42), rng.uniform(0.42, 0.9)))
    # a few coloured points, stretched to the image: a gradient with soft clouds in it
    coarse, clouds = int(rng.integers(4, 17)), rng.uniform(4, 16)
    across = np.linspace(-0.5, 0.5, coarse)
    mix = np.clip(across[:, None] + 0.5 + rng.uniform(-0.35, 0.35) * across, 0, 1)[..., None]
    points = top + (bottom - top) * mix + clouds * rng.standard_normal((coarse, coarse, 1))
    points += 0.3 * clouds * rng.standard_normal((coarse, coarse, 3))
    sky = Image.fromarray(np.clip(points, 0, 255).astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    scene = np.asarray(sky).astype(np.float32)
    grain = rng.integers(-4, 5, (height // 2 + 1, width // 2 + 1, 1), dtype=np.int8)
    scene += np.repeat(np.repeat(grain, 2, axis=0), 2, axis=1)[:height, :width]

    layer, pen = blank_layer(size)
    for kind in rng.permutation(3)[: int(rng.integers(1, 3))]:
        (_draw_hills, _draw_blades, _draw_drops)[kind](pen, rng, (layer.width, layer.height), side * SUPERSAMPLING, hue)
    region, things, alpha = composite(layer)
    scene[region] *= 1 - alpha
    scene[region] += things
    return np.clip(scene, 0, 255).astype(np.uint8)


def _muted_color(rng: Rng, hue: float, alpha: tuple[int, int]) -> tuple[int, int, int, int]:
    paint = hsv_to_rgb(hue + rng.normal(0, 0.1), rng.uniform(0.1, 0.45), rng.uniform(0.4, 0.95))
    return premultiply(paint, int(rng.integers(*alpha)))


def _draw_hills(pen: Pen, rng: Rng, end: tuple[int, int], side: int, hue: float) -> None:
    x = np.linspace(0, end[0], 24)
    for level in np.sort(rng.uniform(0.55, 0.95, int(rng.integers(1, 4)))):
        waves = np.sin(x / side * rng.uniform(3, 8) + rng.uniform(0, 7))
        waves += np.sin(x / side * rng.uniform(8, 15) + rng.uniform(0, 7)) / 3
        y = level * end[1] + side * rng.uniform(0.02, 0.08) * waves
        outline = np.concatenate([np.stack([x, y], axis=1), [[end[0], end[1]], [0, end[1]]]])
        pen.polygon(outline.ravel().tolist(), fill=_muted_color(rng, hue, (120, 220)))


def _draw_blades(pen: Pen, rng: Rng, end: tuple[int, int], side: int, hue: float) -> None:
    wind, t = rng.uniform(-0.35, 0.35), np.linspace(0, 1, 6)
    for _ in range(int(rng.integers(8, 26))):
        length, bend = side * rng.uniform(0.12, 0.5), wind + rng.normal(0, 0.2)
        x = rng.uniform(0, end[0]) + length * bend * t**2
        path = np.stack([x, end[1] + 2 - length * t], axis=1)
        blade = ribbon(path, side * rng.uniform(0.012, 0.03), side * 0.003)
        pen.polygon(blade.ravel().tolist(), fill=_muted_color(rng, hue, (110, 220)))


def _draw_drops(pen: Pen, rng: Rng, end: tuple[int, int], side: int, hue: float) -> None:
    for _ in range(int(rng.integers(4, 13))):
        radius = side * rng.uniform(0.03, 0.16)
        x, y, flat, angle = rng.uniform(0, end[0]), rng.uniform(0, end[1]), rng.uniform(0.5, 1), rng.uniform(0, math.pi)
        drop = ellipse(x, y, radius, radius * flat, angle)
        pen.polygon(drop.ravel().tolist(), fill=_muted_color(rng, hue, (35, 110)))
