"""A generated, part-annotated data set: drawn creatures whose parts are known to the pixel.

Start with `generate_dataset`, which writes an ImageFolder with part annotations, and `read_annotations`. Species differ
in the shape of a few parts only, so `opal_deploy.evaluation.pointing` can measure whether an explanation's boxes lie on
the parts that tell the species apart. `example_images` draws images for checking an exported model. Needs only NumPy,
Pillow and msgspec.
"""

from opal_deploy.synthetic.dataset import (
    Annotation,
    draw_example,
    example_images,
    generate_dataset,
    read_annotations,
    test_vector_images,
)

__all__ = ["Annotation", "draw_example", "example_images", "generate_dataset", "read_annotations", "test_vector_images"]
