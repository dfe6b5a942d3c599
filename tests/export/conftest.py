"""Networks that are exported for real, and TensorRT for RTX, which parses and builds them without a GPU."""

import functools

import pytest

from opal_deploy.export import images
from opal_deploy.export.builder import EngineTarget
from opal_deploy.model.config import HeadConfig
from opal_deploy.runtime.tensorrt import TENSORRT_RTX, installed_version, load
from opal_deploy.synthetic import draw_example
from tests.builders import SMALL_BACKBONE, build_checkpoint, export_onnx

needs_rtx = pytest.mark.skipif(installed_version(TENSORRT_RTX) is None, reason="TensorRT for RTX is not installed")
SM80 = EngineTarget(TENSORRT_RTX, "sm80", None, "a test")


@pytest.fixture(scope="session")
def rtx():
    """Its library, or None where it is not installed."""
    return None if installed_version(TENSORRT_RTX) is None else load(TENSORRT_RTX, "a test")


@pytest.fixture(autouse=True, scope="session")
def _images_drawn_once():
    """Drawing the verification images takes longer than the rest of a tiny export; they are always the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "draw_example", functools.cache(draw_example))
        yield


@pytest.fixture(scope="session")
def resnet():
    """A small ResNet with an attention that is far from uniform."""
    return build_checkpoint(SMALL_BACKBONE, HeadConfig(epsilon=0.1))


@pytest.fixture(scope="session")
def write_onnx():
    return export_onnx


@pytest.fixture(scope="session")
def fp32(write_onnx, tmp_path_factory):
    """`c.onnx` of a tiny network; whoever writes beside it copies it first."""
    return write_onnx(build_checkpoint(seed=8), tmp_path_factory.mktemp("fp32") / "c.onnx").path
