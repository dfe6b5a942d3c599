"""The colours of slots: Okabe and Ito's set, which people with common colour-vision deficiencies can tell apart.

Black is replaced by a dark grey, which has lighter and darker shades too, and the order keeps the first few slots, all
that most models have, far apart. Slots 8-15 take lighter and 16-23 darker shades of the same hues; from 24 on colours
repeat, and the number in the tag tells slots apart.
"""

from __future__ import annotations

from functools import lru_cache

RGB = tuple[int, int, int]

WHITE: RGB = (255, 255, 255)
BLACK: RGB = (0, 0, 0)

# Okabe & Ito, "Color Universal Design" (2008)
BASE_COLORS: tuple[RGB, ...] = (
    (0, 114, 178),  # blue
    (240, 228, 66),  # yellow
    (213, 94, 0),  # vermilion
    (86, 180, 233),  # sky blue
    (204, 121, 167),  # reddish purple
    (91, 91, 91),  # dark grey, for black
    (230, 159, 0),  # orange
    (0, 158, 115),  # bluish green
)
_LIGHTER, _DARKER = 0.55, 0.5
# distinct slot colours, shades included
NUM_COLORS = 3 * len(BASE_COLORS)


def slot_color(slot: int) -> RGB:
    """Return the colour of a slot (0, 1, ...)."""
    shade, hue = divmod(slot, len(BASE_COLORS))
    color = BASE_COLORS[hue]
    if shade % 3 == 1:
        return _mix(color, WHITE, _LIGHTER)
    if shade % 3 == 2:
        return _mix(color, BLACK, _DARKER)
    return color


@lru_cache(maxsize=1024)
def text_color(background: RGB) -> RGB:
    """Return white or black, whichever contrasts more with `background` (at least 4.5:1, WCAG AA)."""
    return WHITE if contrast_ratio(WHITE, background) > contrast_ratio(BLACK, background) else BLACK


def contrast_ratio(a: RGB, b: RGB) -> float:
    """Return the WCAG 2 contrast ratio of two colours, from 1 to 21."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def to_hex(color: RGB) -> str:
    """Return the colour as CSS writes it: #rrggbb."""
    return "#{:02x}{:02x}{:02x}".format(*color)


def _luminance(color: RGB) -> float:
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (c / 255 for c in color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _mix(color: RGB, other: RGB, share: float) -> RGB:
    red, green, blue = (round(c + (o - c) * share) for c, o in zip(color, other, strict=True))
    return red, green, blue
