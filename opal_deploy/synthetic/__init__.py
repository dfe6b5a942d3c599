"""The generated data set: creatures whose parts, and what tells them apart, are known to the pixel.

`generate` writes an ImageFolder with part annotations; `box_hits` and `summarise` then say how often an explanation's
boxes lie on the parts that make the species, and how often random boxes on the creature would.
"""

from opal_deploy.synthetic.creatures import Creature, PartBox, draw
from opal_deploy.synthetic.dataset import Annotation, DatasetSummary, annotate, generate, read_annotations
from opal_deploy.synthetic.examples import example_images, noise_image
from opal_deploy.synthetic.scenery import background
from opal_deploy.synthetic.species import MAX_SPECIES, VARIANTS, Species, list_species

__all__ = [
    "MAX_SPECIES",
    "VARIANTS",
    "Annotation",
    "Creature",
    "DatasetSummary",
    "PartBox",
    "Species",
    "annotate",
    "background",
    "draw",
    "example_images",
    "generate",
    "list_species",
    "noise_image",
    "read_annotations",
]
