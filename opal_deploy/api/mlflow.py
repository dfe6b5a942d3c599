"""The loader that a folder of `export --mlflow` names for `mlflow.pyfunc.load_model`; does not import MLflow."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np

from opal_deploy.api.model import Model, load

# column of a table of images
COLUMN = "image"


class PyfuncModel:
    """A model with the method that MLflow calls."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return one record per image, as `opal-deploy infer` does; an unreadable image gets an error record.

        Args:
            model_input: a table (pandas) with a column `image`, or a list, of image files as bytes or base64 text.
                A uint8 array [N, H, W, 3] is N images.
            params: thresholds, such as {"min_margin": 0.1, "unknown": "5%"}.

        Raises:
            ValueError: the table has no column `image`, or an image is neither bytes nor text.
        """
        images = [*_list_images(model_input)]
        answers = self.model.predict(images, **(params or {}))
        return [dict(answer) for answer in answers]


def _list_images(given: Any) -> Iterable[Any]:
    if hasattr(given, "columns"):
        if COLUMN not in given.columns:
            raise ValueError(f"columns {', '.join(map(str, given.columns))}: expected a column {COLUMN!r}")
        given = given[COLUMN]
    if isinstance(given, bytes | str):
        given = [given]
    for image in given:
        if isinstance(image, str):
            yield base64.b64decode(image, validate=True)
        elif isinstance(image, bytes | bytearray | memoryview | np.ndarray):
            yield image if isinstance(image, np.ndarray) else bytes(image)
        else:
            raise ValueError(f"found {type(image).__name__}; expected the bytes of image files")


def _load_pyfunc(data_path: str) -> PyfuncModel:
    """Load the model file at a path; MLflow calls this function by its name."""
    return PyfuncModel(load(data_path))
