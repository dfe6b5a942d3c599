"""The folder that Hugging Face's Optimum and transformers.js load (`export --hf`).

    onnx/model.onnx            the graph for Optimum; input `pixel_values`, float32 [N, 3, H0, W0], normalised
    config.json                class names by id
    preprocessor_config.json   resizing and normalisation, as a ViTImageProcessor does them
    opal.onnx                  the graph for opal-deploy, with metadata
    README.md                  the model card

Pipelines return labels and probabilities of the softmax, from the output `logits`; scores and cells
are in the graph's other outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact import onnx_file
from opal_deploy.artifact.files import atomic_write
from opal_deploy.artifact.metadata import Metadata
from opal_deploy.auditing.card import describe_card
from opal_deploy.export.folders import OWN, check_folder, write_texts

MODEL = Path("onnx/model.onnx")
INPUT = "pixel_values"
_CONFIG, _PREPROCESSOR, _CARD = "config.json", "preprocessor_config.json", "README.md"
_USE = """With evidence:

```console
$ pip install 'opal-deploy[cpu]'
$ opal-deploy infer images/ --model opal.onnx{explain}
```

Labels only, with `pip install 'optimum-onnx[onnxruntime]'`:

```python
from optimum.onnxruntime import ORTModelForImageClassification
from transformers import AutoImageProcessor, pipeline

folder = "."
model = ORTModelForImageClassification.from_pretrained(folder)
classify = pipeline("image-classification", model, image_processor=AutoImageProcessor.from_pretrained(folder))
```

The pipelines' probabilities are not calibrated.{crop}
"""


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder to write.

    Attributes:
        folder: new, empty, or an earlier export's with `overwrite`.
    """

    folder: Path
    overwrite: bool = False

    def check(self) -> None:
        """Raise UsageError unless the folder can be written."""
        check_folder("--hf", self.folder, _CONFIG, overwrite=self.overwrite)

    def write(self) -> list[Path]:
        """Make the exported float32 graph the libraries', write the other files, and return the paths of all."""
        rename_input(self.folder / MODEL, INPUT)
        metadata = onnx_file.read_metadata(self.folder / OWN)
        explain = "" if metadata.evidence == "none" else " --explain"
        crop = " Crop images to the object first: the model was trained on crops." if metadata.crop == "boxes" else ""
        texts = {
            _CONFIG: _to_json(describe_config(metadata)),
            _PREPROCESSOR: _to_json(describe_preprocessor(metadata)),
            _CARD: describe_card(metadata, self.folder / OWN, use=_USE.format(explain=explain, crop=crop)),
        }
        return [self.folder / MODEL, self.folder / OWN, *write_texts(self.folder, texts)]


def rename_input(path: Path, name: str) -> None:
    """Give the input of an ONNX file another name, and drop the metadata, which would promise the first one."""
    import onnx

    model = onnx.load(path)
    del model.metadata_props[:]
    (image,) = model.graph.input
    for node in model.graph.node:
        node.input[:] = [name if given == image.name else given for given in node.input]
    image.name = name
    with atomic_write(path) as temporary:
        onnx.save(model, temporary)


def describe_config(metadata: Metadata) -> dict[str, Any]:
    """Return config.json: the names of the classes, by id and by name."""
    names = dict(enumerate(metadata.class_names))
    return {
        # an architecture that the libraries know; they take the network from the graph
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "id2label": {str(index): name for index, name in names.items()},
        "label2id": {name: index for index, name in names.items()},
        "opal_deploy": {"backbone": metadata.backbone, "evidence": metadata.evidence, "crop": metadata.crop},
    }


def describe_preprocessor(metadata: Metadata) -> dict[str, Any]:
    """Return preprocessor_config.json: squash to the input size, then normalise, as `opal-deploy infer` does."""
    height, width = metadata.input_size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": height, "width": width},
        # Pillow's bilinear filter
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(metadata.mean),
        "image_std": list(metadata.std),
    }


def _to_json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
