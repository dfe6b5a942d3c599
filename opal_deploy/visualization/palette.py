"""The colours of slots: ten that readers with and without colour-vision deficiencies can tell apart.

From slot 10 on they repeat, and the number in the tag tells slots apart.
"""

from __future__ import annotations

from functools import lru_cache

RGB = tuple[int, int, int]

WHITE: RGB = (255, 255, 255)
BLACK: RGB = (0, 0, 0)

# Found by a search for ten colours that stay apart as far as possible for normal vision, protanopia, deuteranopia and
# tritanopia (Machado, Oliveira & Fernandes 2009): at least 27 in CIE76, the first five 32. Published sets reach 17
# (Petroff 2021, ten colours) and 16 (Okabe & Ito 2008, eight). The first few, all that most models have, also differ
# in name.
COLORS: tuple[RGB, ...] = (
    (41, 37, 215),  # blue
    (253, 227, 53),  # yellow
    (249, 55, 7),  # red
    (208, 110, 255),  # violet
    (104, 240, 184),  # mint
    (95, 62, 71),  # plum
    (69, 133, 150),  # teal
    (189, 202, 229),  # pale blue
    (152, 0, 14),  # dark red
    (136, 137, 110),  # olive
)


def slot_color(slot: int) -> RGB:
    """Return the colour of a slot (0, 1, ...)."""
    return COLORS[slot % len(COLORS)]


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
