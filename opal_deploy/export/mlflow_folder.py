"""The folder that MLflow loads as a Python function (`export --mlflow`).

    MLmodel            names the loader, `opal_deploy.api.mlflow`, and the model file
    opal.onnx          the model
    python_env.yaml    the environment that `mlflow models serve` makes, with requirements.txt
    README.md          the model card

Nothing here needs MLflow.
"""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path

from opal_deploy._version import __version__
from opal_deploy.artifact import onnx_file
from opal_deploy.auditing.card import describe_card
from opal_deploy.export.folders import OWN, check_folder, write_texts

_CONFIG, _ENVIRONMENT, _REQUIREMENTS, _CARD = "MLmodel", "python_env.yaml", "requirements.txt", "README.md"
_USE = """```python
import mlflow

model = mlflow.pyfunc.load_model(".")
records = model.predict([open("bird.jpg", "rb").read()])
```
"""


@dataclass(frozen=True)
class MlflowFolder:
    """A folder to write; `overwrite` replaces an earlier export's files."""

    folder: Path
    overwrite: bool = False

    def check(self) -> None:
        """Raise UsageError unless the folder can be written."""
        check_folder("--mlflow", self.folder, _CONFIG, overwrite=self.overwrite)

    def write(self) -> list[Path]:
        """Write the files next to the exported model, and return the paths of all."""
        metadata = onnx_file.read_metadata(self.folder / OWN)
        flavour = {
            "loader_module": "opal_deploy.api.mlflow", "data": OWN, "python_version": platform.python_version(),
            "env": {"virtualenv": _ENVIRONMENT},
        }  # fmt: skip
        environment = {
            "python": platform.python_version(), "build_dependencies": ["pip"],
            "dependencies": [f"-r {_REQUIREMENTS}"],
        }  # fmt: skip
        texts = {
            # JSON is YAML
            _CONFIG: json.dumps({"flavors": {"python_function": flavour}}, indent=2) + "\n",
            _ENVIRONMENT: json.dumps(environment, indent=2) + "\n",
            _REQUIREMENTS: f"opal-deploy[{metadata.cpu_extras}]>={__version__}\n",
            _CARD: describe_card(metadata, self.folder / OWN, use=_USE),
        }
        return [self.folder / OWN, *write_texts(self.folder, texts)]
