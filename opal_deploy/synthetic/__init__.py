"""A generated, part-annotated data set: drawn creatures whose parts are known to the pixel.

Start with `generate_dataset`, which writes an ImageFolder with part annotations, and `read_annotations`. Species differ
in the shape of a few parts only, so `opal_deploy.evaluation.pointing` can measure whether an explanation's boxes lie on
the parts that tell the species apart. `example_images` gives images to check an exported model on. Needs NumPy and
Pillow only.
"""

from opal_deploy.synthetic.creatures import Creature, PartBox, draw_creature
from opal_deploy.synthetic.dataset import (
    Annotation,
    DatasetSummary,
    build_annotation,
    draw_example,
    example_images,
    generate_dataset,
    noise_image,
    read_annotations,
    test_vector_images,
)
from opal_deploy.synthetic.scenery import draw_background
from opal_deploy.synthetic.species import MAX_SPECIES, VARIANTS, Species, list_species

__all__ = [
    "MAX_SPECIES",
    "VARIANTS",
    "Annotation",
    "Creature",
    "DatasetSummary",
    "PartBox",
    "Species",
    "build_annotation",
    "draw_background",
    "draw_creature",
    "draw_example",
    "example_images",
    "generate_dataset",
    "list_species",
    "noise_image",
    "read_annotations",
    "test_vector_images",
]
