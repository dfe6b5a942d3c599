"""The background of a creature, drawn from random numbers alone, and the layers that both are painted on."""

from __future__ import annotations

import colorsys
import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from opal_deploy.synthetic.shapes import ellipse, ribbon

Color = tuple[int, int, int]
SUPERSAMPLING = 2


def hsv_to_rgb(hue: float, saturation: float, value: float) -> Color:
    """Return RGB, 0 ... 255, of a hue (any number, period 1), a saturation and a value (both 0 ... 1)."""
    r, g, b = colorsys.hsv_to_rgb(hue % 1.0, saturation, value)
    return round(255 * r), round(255 * g), round(255 * b)


def blank_layer(size: tuple[int, int]) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """Return an empty supersampled layer for an image of `size` (H, W), painted with colours of `premultiply`."""
    # four plain bands: colours are kept multiplied by their alpha, so shrinking needs no conversion there and back
    layer = Image.new("CMYK", (size[1] * SUPERSAMPLING, size[0] * SUPERSAMPLING))
    return layer, ImageDraw.Draw(layer)


def premultiply(paint: Color, alpha: int = 255) -> tuple[int, int, int, int]:
    """Return a colour as layers take it, multiplied by `alpha` (0 ... 255)."""
    r, g, b = paint
    return r * alpha // 255, g * alpha // 255, b * alpha // 255, alpha


def composite(layer: Image.Image) -> tuple[tuple[slice, slice], NDArray[np.float32], NDArray[np.float32]]:
    """Reduce a layer to the image's size, only where something was painted.

    Returns:
        The rows and columns of that region [h, w]; colour times alpha, float32 [h, w, 3], 0 ... 255; and alpha, float32
        [h, w, 1], 0 ... 1.
    """
    small = layer.reduce(SUPERSAMPLING)
    box = small.getbbox() or (0, 0, 1, 1)
    bands = np.asarray(small.crop(box)).astype(np.float32)
    return (slice(box[1], box[3]), slice(box[0], box[2])), bands[..., :3], bands[..., 3:] / np.float32(255)


def draw_background(rng: np.random.Generator, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw a scene without a creature.

    Args:
        rng: the source of the scene; how far it is advanced depends on its own draws alone.
        size: (H, W) in pixels.

    Returns:
        uint8 [H, W, 3], RGB: a gradient with soft colour noise, then hills, blades or drops, muted so that a creature
        stands out.
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


def _muted_color(rng: np.random.Generator, hue: float, alpha: tuple[int, int]) -> tuple[int, int, int, int]:
    paint = hsv_to_rgb(hue + rng.normal(0, 0.1), rng.uniform(0.1, 0.45), rng.uniform(0.4, 0.95))
    return premultiply(paint, int(rng.integers(*alpha)))


def _draw_hills(
    pen: ImageDraw.ImageDraw, rng: np.random.Generator, end: tuple[int, int], side: int, hue: float
) -> None:
    x = np.linspace(0, end[0], 24)
    for level in np.sort(rng.uniform(0.55, 0.95, int(rng.integers(1, 4)))):
        waves = (
            np.sin(x / side * rng.uniform(3, 8) + rng.uniform(0, 7))
            + np.sin(x / side * rng.uniform(8, 15) + rng.uniform(0, 7)) / 3
        )
        y = level * end[1] + side * rng.uniform(0.02, 0.08) * waves
        outline = np.concatenate([np.stack([x, y], axis=1), [[end[0], end[1]], [0, end[1]]]])
        pen.polygon(outline.ravel().tolist(), fill=_muted_color(rng, hue, (120, 220)))


def _draw_blades(
    pen: ImageDraw.ImageDraw, rng: np.random.Generator, end: tuple[int, int], side: int, hue: float
) -> None:
    wind, t = rng.uniform(-0.35, 0.35), np.linspace(0, 1, 6)
    for _ in range(int(rng.integers(8, 26))):
        length, bend = side * rng.uniform(0.12, 0.5), wind + rng.normal(0, 0.2)
        x = rng.uniform(0, end[0]) + length * bend * t**2
        path = np.stack([x, end[1] + 2 - length * t], axis=1)
        blade = ribbon(path, side * rng.uniform(0.012, 0.03), side * 0.003)
        pen.polygon(blade.ravel().tolist(), fill=_muted_color(rng, hue, (110, 220)))


def _draw_drops(
    pen: ImageDraw.ImageDraw, rng: np.random.Generator, end: tuple[int, int], side: int, hue: float
) -> None:
    for _ in range(int(rng.integers(4, 13))):
        radius = side * rng.uniform(0.03, 0.16)
        drop = ellipse(
            rng.uniform(0, end[0]),
            rng.uniform(0, end[1]),
            radius,
            radius * rng.uniform(0.5, 1),
            rng.uniform(0, math.pi),
        )
        pen.polygon(drop.ravel().tolist(), fill=_muted_color(rng, hue, (35, 110)))
