"""One drawn creature: its picture, where each part is, and which pixels are creature."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import UsageError
from opal_deploy.synthetic.scenery import (
    SUPERSAMPLING,
    Color,
    blank_layer,
    composite,
    draw_background,
    hsv_to_rgb,
    premultiply,
)
from opal_deploy.synthetic.shapes import Frame, Points, ellipse, line, part_polygons, place_in_frame, ribbon, rotate
from opal_deploy.synthetic.species import VARIANTS, Species

MIN_SIDE = 32
_OUTLINE = 0.009  # width of the dark line around everything, in creature units


@dataclass(frozen=True)
class PartBox:
    """Where one part of a creature is, in pixels; a pixel's own area is [x, x + 1] x [y, y + 1].

    Attributes:
        variant: which variant of the part this is.
        box: (x0, y0, x1, y1), tight around everything the part paints. Also given for a part that was hidden.
        centre: (x, y), centre of gravity of the part's outlines.
        distinguishing: whether the variant tells this species from most others, see `Species.distinguishing`.
        visible: False only if the part was left out, see `draw`.
    """

    variant: str
    box: tuple[float, float, float, float]
    centre: tuple[float, float]
    distinguishing: bool
    visible: bool


@dataclass(frozen=True)
class Creature:
    """A drawn creature.

    Attributes:
        image: uint8 [H, W, 3], RGB.
        parts: part name -> where it is, for every part.
        foreground: bool [H, W], the pixels that the creature covers at least half of.
    """

    image: NDArray[np.uint8]
    parts: dict[str, PartBox]
    foreground: NDArray[np.bool_]


@dataclass(frozen=True)
class _Appearance:
    """Everything about a drawing that is left to chance except the scene; nothing in it depends on the species."""

    flip: bool
    angle: float  # of the whole creature, radians
    lean: float  # of the body
    head: tuple[float, float]  # centre of the head, creature units
    tilt: float  # of the head
    wobble: dict[str, float]  # direction of each part, radians off its rest
    stride: float  # half the distance between the feet, creature units
    scale: float
    place: tuple[float, float]  # 0 ... 1, where within the room that is left
    light: tuple[float, float]  # how much brighter a side is, across and down
    body: Color
    belly: Color
    legs: Color
    dark: Color  # of the lines around everything
    paint: dict[str, tuple[Color, Color]]  # of each part: its colour and its second colour


# A part's colour varies around a hue that is the part's own, in every species alike: it helps to find the part and says
# nothing of its shape, which alone tells species apart. From random weights a network then learns within minutes.
_HUES = {"beak": 0.08, "crest": 0.95, "wing": 0.60, "tail": 0.36, "feet": 0.16}
_HUE_JITTER = 0.05


def _sample_appearance(rng: np.random.Generator) -> _Appearance:
    def within(limit: float) -> float:
        return float(rng.uniform(-limit, limit))

    hue = rng.uniform()
    body = hsv_to_rgb(hue, rng.uniform(0.08, 0.32), rng.uniform(0.6, 0.92))
    belly = hsv_to_rgb(hue + within(0.06), rng.uniform(0.08, 0.3), rng.uniform(0.9, 1.0))
    paint: dict[str, tuple[Color, Color]] = {}
    for part in VARIANTS:
        own = _HUES[part] + within(_HUE_JITTER)
        first = hsv_to_rgb(own, rng.uniform(0.6, 0.95), rng.uniform(0.65, 1.0))
        # a mark is much darker or much lighter than what it lies on: its shape must be readable whatever the hues
        bright = 0.3 * first[0] + 0.59 * first[1] + 0.11 * first[2] > 125
        saturation, value = ((0.4, 0.9), (0.1, 0.3)) if bright else ((0.0, 0.18), (0.94, 1.0))
        paint[part] = first, hsv_to_rgb(own + within(0.2), rng.uniform(*saturation), rng.uniform(*value))
    return _Appearance(
        flip=bool(rng.uniform() < 0.5),
        angle=math.radians(within(20)),
        lean=math.radians(within(9)),
        head=(0.185 + within(0.022), -0.185 + within(0.025)),
        tilt=math.radians(within(12)),
        wobble={part: math.radians(within(8 if part == "wing" else 12)) for part in VARIANTS},
        stride=float(rng.uniform(0.052, 0.066)),
        scale=float(rng.uniform(0.86, 1.02)),
        place=(float(rng.uniform()), float(rng.uniform())),
        light=(within(0.12), float(rng.uniform(-0.22, 0.0))),
        body=body,
        belly=belly,
        legs=hsv_to_rgb(rng.uniform(), rng.uniform(0.2, 0.6), rng.uniform(0.35, 0.7)),
        dark=hsv_to_rgb(rng.uniform(), 0.4, rng.uniform(0.1, 0.2)),
        paint=paint,
    )


def _frames(look: _Appearance) -> dict[str, list[Frame]]:
    """Part -> (x, y, direction) of the frames it is drawn in, in creature units: facing right, body at the origin."""
    (hx, hy), lean = look.head, look.lean

    def on_body(x: float, y: float) -> tuple[float, float]:
        px, py = rotate(np.array([[x, y]]), lean)[0]
        return float(px), float(py)

    def on_head(angle: float) -> tuple[float, float]:
        return hx + 0.086 * math.cos(look.tilt + angle), hy + 0.086 * math.sin(look.tilt + angle)

    up = -1.75
    rest = {
        "beak": (*on_head(0.1), look.tilt),
        "crest": (*on_head(up), look.tilt + up),
        "wing": (*on_body(-0.025, -0.005), lean),
        "tail": (*on_body(-0.19, -0.03), lean + math.pi + 0.12),
    }
    frames = {part: [(x, y, angle + look.wobble[part])] for part, (x, y, angle) in rest.items()}
    frames["feet"] = [(x, 0.235, look.wobble["feet"] / 2) for x in (0.01 - look.stride, 0.01 + look.stride)]
    return frames


def _paint_order(look: _Appearance, variants: Mapping[str, str]) -> Iterator[tuple[str, Points, Color, bool]]:
    """(part or "", outline in creature units, colour, whether it gets a dark line around), from back to front."""
    frames = _frames(look)

    def part(name: str) -> Iterator[tuple[str, Points, Color, bool]]:
        fill, mark = look.paint[name]
        tones = {"fill": fill, "base": fill, "mark": mark, "rib": look.dark}
        for frame in frames[name]:
            for outline, tone in part_polygons(name, variants[name]):
                yield name, place_in_frame(outline, frame), tones[tone], tone == "fill"

    hx, hy = look.head
    yield from part("tail")
    for x, y, _ in frames["feet"]:
        yield "", line(x * 0.75, 0.09, x, y, 0.028, 0.022), look.legs, True
    yield from part("feet")
    neck = np.array([[0.07, -0.03], [0.13, -0.1], [hx, hy]])
    yield "", ribbon(neck, 0.2, 0.1), look.body, True
    yield "", rotate(ellipse(0, 0, 0.2, 0.142, corners=40), look.lean), look.body, True
    yield "", ribbon(neck, 0.185, 0.085), look.body, False  # again, over the line between neck and body
    yield "", rotate(ellipse(0.035, 0.075, 0.125, 0.054), look.lean), look.belly, False
    yield from part("wing")
    yield from part("crest")
    yield from part("beak")
    yield "", ellipse(hx, hy, 0.09, 0.09, corners=32), look.body, True
    ex, ey = rotate(np.array([[0.028, -0.022]]), look.tilt)[0] + (hx, hy)
    yield "", ellipse(ex, ey, 0.027, 0.029, corners=20), (250, 250, 246), True
    yield "", ellipse(ex + 0.006, ey, 0.014, 0.016, corners=16), (22, 20, 26), False


def _to_pixels(look: _Appearance, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[2, 2] matrix and [2] shift from creature units to pixels.

    Room is kept for every variant of every part, so that a creature's place does not depend on its species.
    """
    height, width = size
    frames = _frames(look)
    corners = [
        place_in_frame(outline, frame)
        for part, names in VARIANTS.items()
        for name in names
        for outline, _ in part_polygons(part, name)
        for frame in frames[part]
    ]
    c, s = math.cos(look.angle), math.sin(look.angle)
    matrix = np.array([[-1.0 if look.flip else 1.0, 0.0], [0.0, 1.0]]) @ np.array([[c, s], [-s, c]]) * min(size)
    reach = np.concatenate(corners) @ matrix
    low, high = reach.min(axis=0), reach.max(axis=0)
    margin = 0.02 * min(size)
    room = np.array([width, height], dtype=np.float64) - 2 * margin
    scale = min(look.scale, float((room / (high - low)).min()))
    shift = margin - low * scale + (room - (high - low) * scale) * look.place
    return matrix * scale, shift


def check_size(size: tuple[int, int]) -> None:
    """Raise UsageError unless a creature can be drawn in (H, W) pixels."""
    if min(size) < MIN_SIDE:
        raise UsageError(f"creatures of {size[0]}x{size[1]} pixels asked for: each side must be at least {MIN_SIDE}")


def draw_creature(
    species: Species, rng: np.random.Generator, size: tuple[int, int], *, hide: Collection[str] = ()
) -> Creature:
    """Draw a creature of a species.

    Scene, pose, colours and place come from `rng` and do not depend on the species: two species drawn from generators
    in the same state differ only inside the boxes of the parts in which the species differ.

    Args:
        species: what to draw.
        rng: source of everything else.
        size: (H, W) in pixels, each at least 32.
        hide: names of parts to leave out, everything else unchanged (to see what a classifier makes of it).

    Raises:
        UsageError: the picture is too small, or `hide` names something that is not a part.
    """
    check_size(size)
    if unknown := set(hide) - set(VARIANTS):
        raise UsageError(f"no such part to hide: {', '.join(sorted(unknown))}; parts are {', '.join(VARIANTS)}")
    scene = draw_background(rng, size)
    look = _sample_appearance(rng)
    matrix, shift = _to_pixels(look, size)

    stroke = _OUTLINE * math.sqrt(abs(float(np.linalg.det(matrix))))
    layer, pen = blank_layer(size)
    outlines: dict[str, list[Points]] = {part: [] for part in VARIANTS}
    for part, points, paint, outlined in _paint_order(look, species.variants):
        pixels = points @ matrix + shift
        if part and outlined:
            outlines[part].append(pixels)
        if part in hide:
            continue
        flat = (pixels * SUPERSAMPLING - 0.5).ravel().tolist()
        pen.polygon(flat, fill=premultiply(paint))
        if outlined:
            pen.line(flat + flat[:4], fill=premultiply(look.dark), width=max(1, round(stroke * SUPERSAMPLING)))
    region, figure, alpha = composite(layer)
    down, across = (
        np.linspace(-1, 1, length, dtype=np.float32)[part] for length, part in zip(size, region, strict=True)
    )
    light = 1 + look.light[0] * across + look.light[1] * down[:, None]
    lit = scene[region] * (1 - alpha) + figure * light[..., None]
    scene[region] = np.clip(lit + 0.5, 0, 255).astype(np.uint8)
    foreground = np.zeros(size, dtype=np.bool_)
    foreground[region] = alpha[..., 0] >= 0.5
    return Creature(
        image=scene,
        parts={
            part: _part_box(
                outlines[part], stroke, species.variants[part], part in species.distinguishing, part not in hide
            )
            for part in VARIANTS
        },
        foreground=foreground,
    )


def _part_box(outlines: list[Points], stroke: float, variant: str, distinguishing: bool, visible: bool) -> PartBox:
    corners = np.concatenate(outlines)
    # half the dark line, and half a pixel for the corners that the rasteriser moves
    low, high = corners.min(axis=0) - stroke / 2 - 0.5, corners.max(axis=0) + stroke / 2 + 0.5
    moments = np.array([_moments(outline) for outline in outlines]).sum(axis=0)
    x0, y0, x1, y1, x, y = (round(float(v), 2) for v in (*low, *high, *(moments[1:] / moments[0])))
    return PartBox(variant, (x0, y0, x1, y1), (x, y), distinguishing, visible)


def _moments(points: Points) -> tuple[float, float, float]:
    """Area of a polygon, and area times its centre of gravity (x, y)."""
    after = np.roll(points, -1, axis=0)
    cross = points[:, 0] * after[:, 1] - after[:, 0] * points[:, 1]
    x, y = ((points + after) * cross[:, None]).sum(axis=0) / 6
    sign = 1.0 if cross.sum() >= 0 else -1.0
    return sign * float(cross.sum()) / 2, sign * float(x), sign * float(y)
