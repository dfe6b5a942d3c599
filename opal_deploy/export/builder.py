"""Building TensorRT engines: the choice of builder and GPU, parsing an ONNX graph, and the build.

The rule of `opal-deploy export --trt`:

1. TensorRT, where it and a GPU are present and the target is that GPU.
2. Otherwise TensorRT for RTX, ahead of time and without a GPU, for every --target; by default the GPU that is present,
   else sm80.
3. Otherwise one line that says what to install.

`--builder` forces one of the two.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import ArtifactError, MissingExtra, UsageError, install_command
from opal_deploy.export.options import EngineOptions
from opal_deploy.options import flag_of
from opal_deploy.runtime.devices import Driver, Gpu
from opal_deploy.runtime.tensorrt import (
    AHEAD_OF_TIME,
    AMPERE_PLUS,
    DEFAULT_TARGET,
    EXTRAS,
    TENSORRT,
    TENSORRT_RTX,
    TITLES,
    UNLISTED,
    Bindings,
    attempt,
    example_gpus,
    first_error,
    installed_version,
    make_logger,
    parse_target,
    sm_name,
)

# receives (phase, steps done, all steps); raising KeyboardInterrupt ends the build
OnProgress = Callable[[str, int, int], None]
# receives (severity, message) of the builder
OnMessage = Callable[[str, str], None]

# the target that stands for the GPU present, whether or not TensorRT for RTX names its compute capability
CURRENT = "current"


@dataclass(frozen=True)
class EngineTarget:
    """The builder (`tensorrt` or `tensorrt-rtx`) and compute capability (such as `sm80`) of one engine, and why these.

    `gpu` is the GPU present, if the engine is for it; with `current` the builder is asked for that GPU instead of for a
    compute capability.
    """

    builder: str
    sm: str
    gpu: Gpu | None
    reason: str
    current: bool = False


def choose_engine_targets(
    options: EngineOptions, driver: Driver, version_of: Callable[[str], str | None] = installed_version
) -> list[EngineTarget]:
    """Return the engines to build by the module's rule: one per GPU.

    Raises:
        MissingExtra: the builder that is needed is not installed.
        UsageError: no builder here can build for a GPU, or the builder lacks one of the options.
    """
    targets = _choose(options, driver, version_of)
    for target in targets:
        _check_builder(options, target.builder, gpu=bool(driver.gpus))
    return targets


def _choose(options: EngineOptions, driver: Driver, version_of: Callable[[str], str | None]) -> list[EngineTarget]:
    builder, gpu = options.builder, driver.gpus[0] if driver.gpus else None
    here = sm_name(gpu.compute_capability) if gpu else None
    chosen = list(dict.fromkeys(CURRENT if name == CURRENT else parse_target(name) for name in options.target))
    if CURRENT in chosen and gpu is None:
        raise UsageError(f"--target {CURRENT}: no GPU here ({driver.problem}); name a target such as sm80")
    if builder != TENSORRT_RTX and version_of(TENSORRT) is not None and gpu is not None:
        if all(sm in (here, CURRENT) for sm in chosen):
            return [EngineTarget(TENSORRT, str(here), gpu, f"{TITLES[TENSORRT]} and {gpu.name} are present")]
        if builder == TENSORRT:
            others = ", ".join(sm for sm in chosen if sm != here)
            raise UsageError(
                f"--target {others}: {TITLES[TENSORRT]} builds only for the GPU present, {gpu.name} ({here}); run this "
                "command on the target, or use --builder tensorrt-rtx"
            )
    if builder == TENSORRT:
        if version_of(TENSORRT) is None:
            raise MissingExtra("tensorrt-cu13 with its libraries", EXTRAS[TENSORRT], "--builder tensorrt")
        raise UsageError(
            f"--builder tensorrt: builds only on the GPU that runs the engine: {driver.problem or 'none is here'}; "
            "copy the ONNX file there, or use --builder tensorrt-rtx"
        )
    if version_of(TENSORRT_RTX) is None:
        tensorrt = "" if gpu is None else f"; or TensorRT for the GPU present: {install_command('trt')}"
        raise UsageError(
            "export --trt needs TensorRT for RTX, which builds engines with or without a GPU: "
            f"{install_command(EXTRAS[TENSORRT_RTX])}{tensorrt}"
        )
    return [_ahead_of_time(sm, gpu, here) for sm in chosen or [here or DEFAULT_TARGET]]


def _ahead_of_time(sm: str, gpu: Gpu | None, here: str | None) -> EngineTarget:
    if sm == CURRENT:
        return EngineTarget(TENSORRT_RTX, str(here), gpu, f"--target {CURRENT}, the GPU present", current=True)
    if int(sm.removeprefix("sm")) < 75:
        raise UsageError(f"{sm}: engines built for CUDA 13 run on sm75 and newer; use the ONNX file on a CPU")
    if sm not in AHEAD_OF_TIME:
        like = f" ({example_gpus(sm)})" if example_gpus(sm) else ""
        raise UsageError(
            f"{sm}{like}: {TITLES[TENSORRT_RTX]} builds for {', '.join(AHEAD_OF_TIME)}; install TensorRT on that "
            f"machine ({install_command('trt')}) and run this command there with the ONNX file, or run the fp16 "
            f"ONNX file there with ONNX Runtime ({install_command('gpu')})"
        )
    if sm == here and gpu is not None:
        reason = f"ahead of time, for the GPU present ({gpu.name})"
        if sm == UNLISTED:
            reason += (
                f"; NVIDIA does not list {sm} for {TITLES[TENSORRT_RTX]}: where ONNX Runtime can use the GPU, infer "
                "prefers the ONNX file; for an engine that is sure to run install TensorRT "
                f"({install_command('trt')})"
            )
        return EngineTarget(TENSORRT_RTX, sm, gpu, reason)
    why = "no GPU here" if gpu is None else f"not the GPU present, {here}"
    return EngineTarget(TENSORRT_RTX, sm, None, f"ahead of time: {why}")


def _check_builder(options: EngineOptions, builder: str, *, gpu: bool) -> None:
    """Raise UsageError for an option that a builder lacks; `gpu` tells whether the machine has a GPU."""
    if builder != TENSORRT_RTX:
        return
    title = TITLES[builder]
    for name in ("timing_cache", "version_compatible", "hardware_compatible"):
        if getattr(options, name) not in (None, False):
            raise UsageError(
                f"{flag_of(name)}: {title} has no such option (its engines are compiled on the GPU that "
                "runs them); leave it out, or build with --builder tensorrt on a machine with a GPU"
            )
    if options.strip_weights and not gpu:
        raise UsageError(f"--strip-weights: {title} needs a GPU here for that; leave it out")


@dataclass(frozen=True)
class SerializedEngine:
    """A serialized engine, and the seconds that its build took."""

    content: bytes
    seconds: float


class Network:
    """An ONNX graph in TensorRT, parsed by the bindings `library`, ready to be built."""

    def __init__(self, library: Bindings, model: bytes, name: str, on_message: OnMessage | None = None) -> None:
        """Parse a graph from the bytes of an ONNX file.

        Raises:
            ArtifactError: the parser refuses the graph; the message names the file and the first node that it refuses.
        """
        self.library = library
        self.logger = make_logger(library.module, on_message)
        self._builder = library.module.Builder(self.logger)
        # TensorRT 11 networks are always strongly typed: types are the graph's
        self._network = self._builder.create_network(0)
        self._parser = library.module.OnnxParser(self._network, self.logger)
        if not attempt(self.logger, self._parser.parse, model):
            raise ArtifactError(f"{name}: {library.title} cannot build from it: {self._parser_error()}")

    def profile(self, batch: BatchRange) -> Any:
        """Return TensorRT's optimisation profile for batch sizes; all other dimensions are the graph's."""
        profile = self._builder.create_optimization_profile()
        for tensor in map(self._network.get_input, range(self._network.num_inputs)):
            rest = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, (batch.min, *rest), (batch.opt, *rest), (batch.max, *rest))
        return profile

    def build(
        self, target: EngineTarget, options: EngineOptions, on_progress: OnProgress = lambda *_: None
    ) -> SerializedEngine:
        """Build for one GPU.

        Raises:
            UsageError: the builder fails, or the timing cache cannot be used.
            KeyboardInterrupt: Ctrl-C, or `on_progress` raised it.
        """
        config = self._configure(target, options)
        monitor = _make_monitor(self.library.module, on_progress)
        config.progress_monitor = monitor
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            cache_path = None if options.timing_cache is None else Path(options.timing_cache)
            cache = None if cache_path is None else self._load_timing_cache(config, cache_path)
            with _interrupt_through(monitor):
                engine = attempt(self.logger, self._builder.build_serialized_network, self._network, config)
            if monitor.interrupted:
                raise KeyboardInterrupt
            if engine is None:
                workspace = "; give more --workspace" if options.workspace is not None else ""
                raise UsageError(
                    f"{self.library.title} could not build the engine for {target.sm}: "
                    f"{first_error(self.logger)}{workspace}; --verbose shows its log"
                )
            if cache_path is not None and cache is not None:
                with atomic_write(cache_path) as temporary:
                    temporary.write_bytes(bytes(memoryview(cache.serialize())))
        return SerializedEngine(bytes(memoryview(engine)), time.monotonic() - started)

    def _configure(self, target: EngineTarget, options: EngineOptions) -> Any:
        trt, config = self.library.module, self._builder.create_builder_config()
        # fp32 means TF32 off; the flag is on by default
        config.clear_flag(trt.BuilderFlag.TF32)
        if self.library.name == TENSORRT_RTX:
            capability = "CURRENT" if target.current else target.sm.upper()
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
        config.add_optimization_profile(self.profile(options.batch_range))
        if options.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.strip_weights:
            config.set_flag(trt.BuilderFlag.STRIP_PLAN)
            # an engine without weights must be refittable; identical weights leave the kernels free
            config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
        if options.hardware_compatible is not None and self.library.name == TENSORRT:
            levels = trt.HardwareCompatibilityLevel
            ampere = options.hardware_compatible == AMPERE_PLUS
            config.hardware_compatibility_level = levels.AMPERE_PLUS if ampere else levels.SAME_COMPUTE_CAPABILITY
        return config

    def _load_timing_cache(self, config: Any, path: Path) -> Any:
        try:
            stored = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise UsageError(
                f"--timing-cache {path}: cannot be read ({error.strerror or error}); give another file"
            ) from None
        cache = attempt(self.logger, config.create_timing_cache, stored)
        if cache is None or not attempt(self.logger, config.set_timing_cache, cache, False):
            raise UsageError(
                f"{path}: not a timing cache of {self.library.title} on this GPU ({first_error(self.logger)}); give "
                "another file, or delete it"
            )
        return cache

    def _parser_error(self) -> str:
        if not self._parser.num_errors:
            return first_error(self.logger)
        error = self._parser.get_error(0)
        node = error.node_name() or f"node {error.node()}"
        return f"{node} ({error.node_operator() or 'unknown operation'}): {' '.join(str(error.desc()).split())[:300]}"


@contextmanager
def _interrupt_through(monitor: Any) -> Iterator[None]:
    """Let Ctrl-C end the build through its monitor: nothing may be raised through running native code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        monitor.interrupted = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _make_monitor(trt: Any, on_progress: OnProgress) -> Any:
    """Return TensorRT's progress monitor, which reports the innermost phase and ends the build on Ctrl-C."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.interrupted = False

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps
            self._report(phase, 0)

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

        def step_complete(self, phase: str, step: int) -> bool:
            self._report(phase, step + 1)
            return not self.interrupted

        def _report(self, phase: str, done: int) -> None:
            # called from native code: nothing may be raised through it
            try:
                on_progress(phase, done, self.steps.get(phase, 0))
            except KeyboardInterrupt:
                self.interrupted = True
            except Exception:
                pass

    return Monitor()
