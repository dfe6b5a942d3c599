"""Can this machine run that engine? Answered from its sidecar, before any native code sees the plan."""

from __future__ import annotations

import platform

from opal_deploy.artifact.engine_file import Sidecar
from opal_deploy.runtime.probe import Driver, Gpu
from opal_deploy.runtime.tensorrt.bindings import EXTRAS, TENSORRT, TITLES, installed_version
from opal_deploy.runtime.tensorrt.cuda import visible_driver
from opal_deploy.runtime.tensorrt.targets import examples, sm_of

# what `--hardware-compatible` may say; see TensorRT's HardwareCompatibilityLevel
AMPERE_PLUS, SAME_CAPABILITY = "ampere+", "same"


def misfit(sidecar: Sidecar, gpu: Gpu | None, driver: Driver, version: str | None) -> str:
    """Why an engine cannot run here, in the order builder and version, compute capability, driver; empty if it can.

    Args:
        sidecar: of the engine.
        gpu: that it is to run on; None: there is none.
        driver: the machine's.
        version: of the engine's builder as installed here; None: it is not.
    """
    name = str(sidecar.builder["name"])
    if gpu is None:
        return f"an engine runs on an NVIDIA GPU only: {driver.problem or 'none is here'}"
    if name not in TITLES:
        return f"it was built by {name!r}, which this version does not know"
    title = TITLES[name]
    if version is None:
        needed = f"{title} {sidecar.builder['version']}"
        return f"it needs {needed}, which is not installed: pip install 'opal-deploy[{EXTRAS[name]}]'"
    if not _same_version(sidecar, version):
        return f"it was built by {title} {sidecar.builder['version']}, and {version} is installed here"
    made_on = sidecar.builder.get("platform")
    if name == TENSORRT and made_on not in (None, here()):
        return f"it was built on {made_on}, and this is {here()}"
    capability = _capability(sidecar, gpu)
    if capability:
        return capability
    cuda = int(sidecar.builder.get("cuda", 0))
    if driver.cuda is not None and driver.cuda[0] < cuda:
        newest = ".".join(map(str, driver.cuda))
        return f"it needs CUDA {cuda}, and driver {driver.version} runs CUDA {newest} at most; update the driver"
    return ""


def here() -> str:
    """This machine's system and processor, which plans of TensorRT are bound to: `Linux x86_64`."""
    return f"{platform.system()} {platform.machine()}"


def misfit_here(sidecar: Sidecar, index: int = 0) -> str:
    """`misfit` for one of the GPUs that CUDA shows this process."""
    driver = visible_driver()
    name = str(sidecar.builder["name"])
    version = installed_version(name) if name in TITLES else None
    return misfit(sidecar, driver.gpus[index] if index < len(driver.gpus) else None, driver, version)


def _same_version(sidecar: Sidecar, version: str) -> bool:
    built = str(sidecar.builder["version"])
    if sidecar.options.get("version_compatible"):
        # such a plan carries its own runtime and is read by newer libraries of the same major version
        before, here = _numbers(built), _numbers(version)
        return before[:1] == here[:1] and here >= before
    return built == version


def _capability(sidecar: Sidecar, gpu: Gpu) -> str:
    target, here = str(sidecar.target["sm"]), sm_of(gpu.compute_capability)
    if target == here:
        return ""
    if (
        sidecar.builder["name"] == TENSORRT
        and sidecar.options.get("hardware_compatible") == AMPERE_PLUS
        and gpu.compute_capability >= (8, 0)
    ):
        return ""
    like = f" ({examples(target)})" if examples(target) else ""
    return f"it was built for {target}{like}, and {gpu.name} is {here}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
