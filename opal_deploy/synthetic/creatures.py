"""Drawn creatures of known species: the image, the boxes of the parts, and the mask of the foreground.

All species share body, head, eye and legs. Five named parts come in four variants each; the first is the common one.
A species has the common variant of three parts and a special variant of two, so any two species differ in two, three or
four parts. The parts that define a species are therefore known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from opal_deploy.errors import UsageError
from opal_deploy.synthetic.shapes import (
    POLYGONS,
    SUPERSAMPLING,
    Color,
    Frame,
    Points,
    Rng,
    blank_layer,
    composite,
    draw_background,
    ellipse,
    hsv_to_rgb,
    line,
    place_in_frame,
    premultiply,
    ribbon,
    rotate,
)

MIN_SIDE = 32
# width of the dark line around every shape, in creature units (1 is the shorter side of the image at scale 1)
_OUTLINE = 0.009

VARIANTS: Mapping[str, tuple[str, ...]] = {part: tuple(variants) for part, variants in POLYGONS.items()}
"""Part name -> its variants, the common one first."""

# consecutive rows use every part about equally often, so that any number of rows from the top is balanced; rows with
# the same two parts differ in both variants
_SPECIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("arbolet", {"beak": "sickle", "tail": "fork"}),
    ("bimlu", {"crest": "spike", "feet": "flippers"}),
    ("corvane", {"wing": "spots", "beak": "spoon"}),
    ("dapplo", {"tail": "shell", "crest": "curl"}),
    ("eskarin", {"feet": "boots", "wing": "ring"}),
    ("fennock", {"beak": "hook", "crest": "ball"}),
    ("gruvel", {"tail": "wave", "feet": "balls"}),
    ("hazlet", {"wing": "zigzag", "crest": "spike"}),
    ("illoko", {"feet": "flippers", "beak": "sickle"}),
    ("jurrim", {"wing": "spots", "tail": "fork"}),
    ("kestari", {"beak": "spoon", "tail": "shell"}),
    ("lumbelin", {"crest": "curl", "feet": "boots"}),
    ("mordax", {"wing": "ring", "beak": "hook"}),
    ("nirrel", {"tail": "wave", "crest": "ball"}),
    ("oskavo", {"feet": "balls", "wing": "zigzag"}),
    ("pellune", {"beak": "sickle", "crest": "curl"}),
)

MAX_SPECIES = len(_SPECIES)


@dataclass(frozen=True)
class Species:
    """One class of creature."""

    name: str  # a lower-case word, and the folder in a data set
    variants: Mapping[str, str]  # of every part of `VARIANTS`
    # parts whose variant differs from that of more than two thirds of the other species that `list_species` returned
    distinguishing: frozenset[str]


def list_species(count: int) -> tuple[Species, ...]:
    """Return the first `count` species in alphabetical order: the index is the class id of an ImageFolder.

    The distinguishing parts of a species depend on `count`, its name and variants do not.

    Raises:
        UsageError: `count` is not within 2 ... MAX_SPECIES.
    """
    if not 2 <= count <= MAX_SPECIES:
        raise UsageError(f"{count} species: expected 2 to {MAX_SPECIES}")
    common = {part: variants[0] for part, variants in VARIANTS.items()}
    rows = {name: common | special for name, special in _SPECIES[:count]}
    species = []
    for name, own in rows.items():
        unlike = {part: sum(others[part] != own[part] for others in rows.values()) for part in VARIANTS}
        distinguishing = frozenset(part for part, number in unlike.items() if 3 * number > 2 * (count - 1))
        species.append(Species(name, own, distinguishing))
    return tuple(species)


@dataclass(frozen=True)
class PartBox:
    """The place of one part of a creature in pixels; pixel (x, y) covers [x, x + 1] x [y, y + 1]."""

    variant: str
    box: tuple[float, float, float, float]  # (x0, y0, x1, y1), tight around the part's pixels, even of a hidden part
    centre: tuple[float, float]  # (x, y) of the centre of gravity of the part's outlines
    distinguishing: bool  # see `Species`
    visible: bool  # False only for a part hidden by `draw_creature`


@dataclass(frozen=True)
class Creature:
    """A drawn creature."""

    image: NDArray[np.uint8]  # [H, W, 3], RGB
    parts: dict[str, PartBox]  # the place of every part
    foreground: NDArray[np.bool_]  # [H, W], True where the creature covers at least half of the pixel


@dataclass(frozen=True)
class _Appearance:
    """All random properties of a drawing except its scene; none depends on the species."""

    flip: bool
    angle: float  # of the whole creature, radians
    lean: float  # of the body
    head: tuple[float, float]  # centre of the head, creature units
    tilt: float  # of the head
    wobble: dict[str, float]  # direction of each part, radians off its rest
    stride: float  # half the distance between the feet, creature units
    scale: float
    place: tuple[float, float]  # 0 ... 1, where within the free margin
    light: tuple[float, float]  # how much brighter a side is, across and down
    body: Color
    belly: Color
    legs: Color
    dark: Color  # of the lines around everything
    paint: dict[str, tuple[Color, Color]]  # of each part: its colour and its second colour


# A part's colour varies around its own hue in every species: that helps to find the part, so that a network learns from
# random weights within minutes, and does not depend on its shape, which tells species apart.
_HUES = {"beak": 0.08, "crest": 0.95, "wing": 0.60, "tail": 0.36, "feet": 0.16}
_HUE_JITTER = 0.05


def _sample_appearance(rng: Rng) -> _Appearance:
    def within(limit: float) -> float:
        return float(rng.uniform(-limit, limit))

    hue = rng.uniform()
    body = hsv_to_rgb(hue, rng.uniform(0.08, 0.32), rng.uniform(0.6, 0.92))
    belly = hsv_to_rgb(hue + within(0.06), rng.uniform(0.08, 0.3), rng.uniform(0.9, 1.0))
    paint: dict[str, tuple[Color, Color]] = {}
    for part in VARIANTS:
        own = _HUES[part] + within(_HUE_JITTER)
        first = hsv_to_rgb(own, rng.uniform(0.6, 0.95), rng.uniform(0.65, 1.0))
        # a mark is much darker or lighter than the part: its shape must be readable whatever the hues
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


def _frames(appearance: _Appearance) -> dict[str, list[Frame]]:
    """Return the frames (x, y, direction) of each part in creature units, facing right, the body at the origin."""
    (hx, hy), lean, stride = appearance.head, appearance.lean, appearance.stride

    def on_body(x: float, y: float) -> tuple[float, float]:
        px, py = rotate(np.array([[x, y]]), lean)[0]
        return float(px), float(py)

    def on_head(angle: float) -> tuple[float, float]:
        return hx + 0.086 * math.cos(appearance.tilt + angle), hy + 0.086 * math.sin(appearance.tilt + angle)

    up = -1.75
    rest = {
        "beak": (*on_head(0.1), appearance.tilt),
        "crest": (*on_head(up), appearance.tilt + up),
        "wing": (*on_body(-0.025, -0.005), lean),
        "tail": (*on_body(-0.19, -0.03), lean + math.pi + 0.12),
    }
    frames = {part: [(x, y, angle + appearance.wobble[part])] for part, (x, y, angle) in rest.items()}
    frames["feet"] = [(0.01 + step, 0.235, appearance.wobble["feet"] / 2) for step in (-stride, stride)]
    return frames


def _paint_order(appearance: _Appearance, variants: Mapping[str, str]) -> Iterator[tuple[str, Points, Color, bool]]:
    """Yield (part or "", outline in creature units, colour, whether it is outlined) from back to front."""
    frames = _frames(appearance)

    def part(name: str) -> Iterator[tuple[str, Points, Color, bool]]:
        fill, mark = appearance.paint[name]
        tones = {"fill": fill, "base": fill, "mark": mark, "rib": appearance.dark}
        for frame in frames[name]:
            for outline, tone in POLYGONS[name][variants[name]]:
                yield name, place_in_frame(outline, frame), tones[tone], tone == "fill"

    hx, hy = appearance.head
    yield from part("tail")
    for x, y, _ in frames["feet"]:
        yield "", line(x * 0.75, 0.09, x, y, 0.028, 0.022), appearance.legs, True
    yield from part("feet")
    neck = np.array([[0.07, -0.03], [0.13, -0.1], [hx, hy]])
    yield "", ribbon(neck, 0.2, 0.1), appearance.body, True
    yield "", rotate(ellipse(0, 0, 0.2, 0.142, corners=40), appearance.lean), appearance.body, True
    yield "", ribbon(neck, 0.185, 0.085), appearance.body, False  # again, over the line between neck and body
    yield "", rotate(ellipse(0.035, 0.075, 0.125, 0.054), appearance.lean), appearance.belly, False
    yield from part("wing")
    yield from part("crest")
    yield from part("beak")
    yield "", ellipse(hx, hy, 0.09, 0.09, corners=32), appearance.body, True
    ex, ey = rotate(np.array([[0.028, -0.022]]), appearance.tilt)[0] + (hx, hy)
    yield "", ellipse(ex, ey, 0.027, 0.029, corners=20), (250, 250, 246), True
    yield "", ellipse(ex + 0.006, ey, 0.014, 0.016, corners=16), (22, 20, 26), False


def _to_pixels(appearance: _Appearance, size: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the matrix [2, 2] and the shift [2] from creature units to pixels.

    All variants of all parts fit, so that a creature's place does not depend on its species.
    """
    height, width = size
    frames = _frames(appearance)
    corners = [
        place_in_frame(outline, frame)
        for part, variants in POLYGONS.items()
        for polygons in variants.values()
        for outline, _ in polygons
        for frame in frames[part]
    ]
    c, s = math.cos(appearance.angle), math.sin(appearance.angle)
    matrix = np.array([[-1.0 if appearance.flip else 1.0, 0.0], [0.0, 1.0]]) @ np.array([[c, s], [-s, c]]) * min(size)
    reach = np.concatenate(corners) @ matrix
    low, high = reach.min(axis=0), reach.max(axis=0)
    margin = 0.02 * min(size)
    available = np.array([width, height], dtype=np.float64) - 2 * margin
    scale = min(appearance.scale, float((available / (high - low)).min()))
    shift = margin - low * scale + (available - (high - low) * scale) * appearance.place
    return matrix * scale, shift


def check_size(size: tuple[int, int]) -> None:
    """Raise UsageError if a side of `size` = (H, W) is under 32 pixels."""
    if min(size) < MIN_SIDE:
        raise UsageError(f"image size {size[0]}x{size[1]}: expected at least {MIN_SIDE} pixels on each side")


def draw_creature(
    species: Species, rng: Rng, size: tuple[int, int], *, hide: Collection[str] = (), scene: Rng | None = None
) -> Creature:
    """Draw a creature of a species.

    Scene, pose, colours and place come from `rng` and do not depend on the species: two species drawn from generators
    in the same state differ only inside the boxes of their differing parts.

    Args:
        rng: the source of all that the species leaves open.
        size: (H, W) in pixels, each at least 32.
        hide: names of parts to leave out, everything else unchanged, to test a classifier without them.
        scene: the source of the background instead of `rng`, everything else unchanged.

    Raises UsageError for a smaller size.
    """
    check_size(size)
    # the scene always advances `rng`
    background = draw_background(rng, size)
    background = background if scene is None else draw_background(scene, size)
    appearance = _sample_appearance(rng)
    matrix, shift = _to_pixels(appearance, size)

    stroke = _OUTLINE * math.sqrt(abs(float(np.linalg.det(matrix))))
    layer, pen = blank_layer(size)
    outlines: dict[str, list[Points]] = {part: [] for part in VARIANTS}
    for part, points, paint, outlined in _paint_order(appearance, species.variants):
        pixels = points @ matrix + shift
        if part and outlined:
            outlines[part].append(pixels)
        if part in hide:
            continue
        flat = (pixels * SUPERSAMPLING - 0.5).ravel().tolist()
        pen.polygon(flat, fill=premultiply(paint))
        if outlined:
            pen.line(flat + flat[:4], fill=premultiply(appearance.dark), width=max(1, round(stroke * SUPERSAMPLING)))
    region, figure, alpha = composite(layer)
    down, across = (
        np.linspace(-1, 1, length, dtype=np.float32)[part] for length, part in zip(size, region, strict=True)
    )
    light = 1 + appearance.light[0] * across + appearance.light[1] * down[:, None]
    lit = background[region] * (1 - alpha) + figure * light[..., None]
    background[region] = np.clip(lit + 0.5, 0, 255).astype(np.uint8)
    foreground = np.zeros(size, dtype=np.bool_)
    foreground[region] = alpha[..., 0] >= 0.5
    parts = {
        part: PartBox(variant, *_locate(outlines[part], stroke), part in species.distinguishing, part not in hide)
        for part, variant in species.variants.items()
    }
    return Creature(background, parts, foreground)


def _locate(outlines: list[Points], stroke: float) -> tuple[tuple[float, float, float, float], tuple[float, float]]:
    """Return the box and the centre of a part."""
    corners = np.concatenate(outlines)
    # half the dark line, and half a pixel for the corners that the rasteriser moves
    low, high = corners.min(axis=0) - stroke / 2 - 0.5, corners.max(axis=0) + stroke / 2 + 0.5
    moments = np.array([_moments(outline) for outline in outlines]).sum(axis=0)
    x0, y0, x1, y1, x, y = (round(float(v), 2) for v in (*low, *high, *(moments[1:] / moments[0])))
    return (x0, y0, x1, y1), (x, y)


def _moments(points: Points) -> tuple[float, float, float]:
    """Return the area of a polygon, and the area times its centre of gravity (x, y)."""
    after = np.roll(points, -1, axis=0)
    cross = points[:, 0] * after[:, 1] - after[:, 0] * points[:, 1]
    x, y = ((points + after) * cross[:, None]).sum(axis=0) / 6
    sign = 1.0 if cross.sum() >= 0 else -1.0
    return sign * float(cross.sum()) / 2, sign * float(x), sign * float(y)
