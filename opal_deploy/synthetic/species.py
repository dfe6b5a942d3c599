"""The species of creatures, and the parts that tell them apart.

All species share body, head, eye and legs. Five named parts come in four variants each; the first is the common one.
A species has the common variant of three parts and a special variant of two, so that any two species differ in two,
three or four parts and agree in the others. So the parts that define a species are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from opal_deploy.errors import UsageError

VARIANTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "beak": ("cone", "sickle", "spoon", "hook"),
        "crest": ("fan", "spike", "curl", "ball"),
        "wing": ("bars", "spots", "ring", "zigzag"),
        "tail": ("paddle", "fork", "shell", "wave"),
        "feet": ("toes", "flippers", "boots", "balls"),
    }
)
"""Part name -> its variants, the common one first."""

# Consecutive rows use every part about equally often, so that any number of rows from the top is balanced;
# rows with the same two parts differ in both variants. tests/synthetic/test_species.py checks that.
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
    """One class of creature.

    Attributes:
        name: a lower-case word, also the folder's name in a data set.
        variants: the variant of every part of `VARIANTS`, by the part's name.
        distinguishing: the parts whose variant differs from that of more than two thirds of the other species in
            the set that `list_species` returned. A variant that most share says little about which species this is.
    """

    name: str
    variants: Mapping[str, str]
    distinguishing: frozenset[str]


def list_species(count: int) -> tuple[Species, ...]:
    """Return the first `count` species in alphabetical order, so that the index is the class id of an ImageFolder.

    Names and variants of a species do not depend on `count`; what distinguishes it does.

    Raises:
        UsageError: `count` is not within 2 ... MAX_SPECIES.
    """
    if not 2 <= count <= MAX_SPECIES:
        raise UsageError(f"{count} species: expected 2 to {MAX_SPECIES}")
    rows = [(name, {part: special.get(part, VARIANTS[part][0]) for part in VARIANTS}) for name, special in _SPECIES]
    rows = rows[:count]
    return tuple(
        Species(
            name,
            MappingProxyType(mine),
            frozenset(
                part for part in VARIANTS if 3 * sum(theirs[part] != mine[part] for _, theirs in rows) > 2 * (count - 1)
            ),
        )
        for name, mine in rows
    )
