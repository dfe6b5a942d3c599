"""The generated data set: creatures whose parts, and what tells them apart, are known to the pixel.

`generate` writes an ImageFolder with part annotations; `box_hits` and `summarise` then say how often an explanation's
boxes lie on the parts that make the species, and how often random boxes on the creature would.
"""

from opal_deploy.demo.creatures import Creature, PartBox, draw
from opal_deploy.demo.dataset import Annotation, DatasetSummary, annotate, generate, read_annotations
from opal_deploy.demo.evidence import EvidenceSummary, Hits, box_hits, cell_foreground, summarise
from opal_deploy.demo.pictures import example_pictures, noise_picture
from opal_deploy.demo.scenery import background
from opal_deploy.demo.species import MAX_SPECIES, VARIANTS, Species, list_species

__all__ = [
    "MAX_SPECIES",
    "VARIANTS",
    "Annotation",
    "Creature",
    "DatasetSummary",
    "EvidenceSummary",
    "Hits",
    "PartBox",
    "Species",
    "annotate",
    "background",
    "box_hits",
    "cell_foreground",
    "draw",
    "example_pictures",
    "generate",
    "list_species",
    "noise_picture",
    "read_annotations",
    "summarise",
]
