"""Building TensorRT engines: the choice of builder and GPU, parsing an ONNX graph, and the build.

The rule of `opal-deploy export --trt`:

1. TensorRT, where it and a GPU are present and the target is that GPU, and for --lean.
2. Otherwise TensorRT for RTX, ahead of time and without a GPU, for every --target; by default the GPU that is present,
   else sm80.

`--builder` forces one of the two. A builder that is not installed is named with the command that installs it.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.errors import ArtifactError, MissingExtra, UsageError, install_command
from opal_deploy.export.options import EngineOptions
from opal_deploy.logs import Progress, no_progress
from opal_deploy.runtime.devices import Driver, Gpu
from opal_deploy.runtime.tensorrt import (
    AHEAD_OF_TIME,
    DEFAULT_TARGET,
    EXTRAS,
    TENSORRT,
    TENSORRT_RTX,
    TITLES,
    Bindings,
    attempt,
    describe_target,
    first_error,
    installed_version,
    make_logger,
    parse_target,
    sm_name,
)


@dataclass(frozen=True)
class EngineTarget:
    """The builder (`tensorrt` or `tensorrt-rtx`) and compute capability (such as `sm80`) of one engine, and why these.

    `gpu` is the GPU present, if the engine is for it.
    """

    builder: str
    sm: str
    gpu: Gpu | None
    reason: str


def choose_engine_targets(
    options: EngineOptions, driver: Driver, version_of: Callable[[str], str | None] = installed_version
) -> list[EngineTarget]:
    """Return the engines to build by the module's rule: one per GPU.

    Raises:
        MissingExtra: the builder that is needed is not installed.
        UsageError: no builder here can build for a GPU.
    """
    gpu = driver.gpus[0] if driver.gpus else None
    present = sm_name(gpu.compute_capability) if gpu else None
    chosen = list(dict.fromkeys(map(parse_target, options.target)))
    elsewhere = [sm for sm in chosen if sm != present]
    is_native = gpu is not None and not elsewhere and version_of(TENSORRT) is not None
    builder: str = options.builder or (TENSORRT if is_native or options.lean else TENSORRT_RTX)
    if options.lean and builder == TENSORRT_RTX:
        raise UsageError("--lean: only TensorRT builds for its lean runtime; leave out --builder, or --lean")
    if version_of(builder) is None:
        raise MissingExtra(f"{builder}-cu13", EXTRAS[builder], f"export --trt with --builder {builder}")
    if builder == TENSORRT_RTX:
        return [_ahead_of_time(sm, gpu, present) for sm in chosen or [present or DEFAULT_TARGET]]
    if gpu is None or elsewhere:
        where = f"{gpu.name} ({present})" if gpu else driver.problem or "none is here"
        raise UsageError(f"--builder tensorrt builds for the GPU present, {where}; run it there, or use tensorrt-rtx")
    return [EngineTarget(TENSORRT, str(present), gpu, f"{TITLES[TENSORRT]} and {gpu.name} are present")]


def _ahead_of_time(sm: str, gpu: Gpu | None, present: str | None) -> EngineTarget:
    if sm not in AHEAD_OF_TIME:
        raise UsageError(
            f"{describe_target(sm)}: {TITLES[TENSORRT_RTX]} builds for {', '.join(AHEAD_OF_TIME)}; install TensorRT on "
            f"that machine ({install_command('trt')}) and run this command there with the ONNX file, or run that file "
            f"with ONNX Runtime ({install_command('gpu')})"
        )
    if sm == present and gpu is not None:
        return EngineTarget(TENSORRT_RTX, sm, gpu, f"ahead of time, for the GPU present ({gpu.name})")
    why = "no GPU here" if gpu is None else f"not the GPU present, {present}"
    return EngineTarget(TENSORRT_RTX, sm, None, f"ahead of time: {why}")


class Network:
    """An ONNX graph in TensorRT, parsed by the bindings `library`, ready to be built."""

    def __init__(self, library: Bindings, model: bytes, name: str) -> None:
        """Parse a graph from the bytes of an ONNX file; ArtifactError names the first node that the parser refuses."""
        self.library = library
        self.logger = make_logger(library.module)
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

    def build(self, target: EngineTarget, options: EngineOptions, progress: Progress = no_progress) -> bytes:
        """Build for one GPU, and return the serialized engine.

        Raises:
            UsageError: the builder fails.
            KeyboardInterrupt: Ctrl-C, or `progress` raised it.
        """
        config = self._configure(target, options)
        monitor = _make_monitor(self.library.module, progress)
        config.progress_monitor = monitor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            with _interrupt_through(monitor):
                engine = attempt(self.logger, self._builder.build_serialized_network, self._network, config)
        if monitor.interrupted:
            raise KeyboardInterrupt
        if engine is None:
            raise UsageError(f"{self.library.title} could not build for {target.sm}: {first_error(self.logger)}")
        return bytes(memoryview(engine))

    def _configure(self, target: EngineTarget, options: EngineOptions) -> Any:
        trt, config = self.library.module, self._builder.create_builder_config()
        # fp32 means TF32 off; the flag is on by default
        config.clear_flag(trt.BuilderFlag.TF32)
        if options.lean:
            # without the copy of the lean runtime that TensorRT would add, so that an engine holds no code of the host
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
            config.set_flag(trt.BuilderFlag.EXCLUDE_LEAN_RUNTIME)
        if self.library.name == TENSORRT_RTX:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, target.sm.upper()), 0)
        config.add_optimization_profile(self.profile(options.batch_range))
        return config

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


def _make_monitor(trt: Any, progress: Progress) -> Any:
    """Return TensorRT's progress monitor, which reports the innermost phase and ends the build on Ctrl-C."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.interrupted = False

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.steps[phase] = steps

        def phase_finish(self, phase: str) -> None:
            self.steps.pop(phase, None)

        def step_complete(self, phase: str, step: int) -> bool:
            # called from native code: nothing may be raised through it
            try:
                progress(step + 1, self.steps.get(phase, 0), phase)
            except KeyboardInterrupt:
                self.interrupted = True
            except Exception:
                pass
            return not self.interrupted

    return Monitor()
