"""Parsing an ONNX file with TensorRT and building a plan from it; errors carry the builder's own words."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opal_deploy.artifact.engine_file import BatchRange
from opal_deploy.artifact.files import atomic_write
from opal_deploy.errors import ArtifactError, UsageError
from opal_deploy.export.tensorrt.options import BuildOptions, EngineTarget, OnMessage, OnProgress
from opal_deploy.runtime.tensorrt.bindings import TENSORRT, TENSORRT_RTX, Bindings, first_error, make_logger
from opal_deploy.runtime.tensorrt.compatibility import AMPERE_PLUS


@dataclass(frozen=True)
class SerializedEngine:
    """A serialized engine, and the seconds that its build took."""

    content: bytes
    seconds: float


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a parsed network; the batch dimension of `shape` is -1."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Network:
    """An ONNX graph in TensorRT, ready to be built.

    Attributes:
        library: the bindings that parsed the graph.
        inputs, outputs: tensors in the graph's order.
    """

    def __init__(self, library: Bindings, model: bytes, name: str, on_message: OnMessage | None = None) -> None:
        """Parse a graph.

        Args:
            library: TensorRT or TensorRT for RTX.
            model: the bytes of an ONNX file.
            name: the file's name, for errors.
            on_message: receives everything that the library logs.

        Raises:
            ArtifactError: the parser refuses the graph; the first node that it refuses is named.
        """
        self.library = library
        self.logger = make_logger(library.module, on_message)
        self._builder = library.module.Builder(self.logger)
        # networks of TensorRT 11 are always strongly typed: types are the graph's
        self._network = self._builder.create_network(0)
        self._parser = library.module.OnnxParser(self._network, self.logger)
        if not self._parser.parse(model):
            raise ArtifactError(f"{name}: {library.title} cannot build from it: {self._parser_error()}")
        self.inputs = [self._info(self._network.get_input(i)) for i in range(self._network.num_inputs)]
        self.outputs = [self._info(self._network.get_output(i)) for i in range(self._network.num_outputs)]

    @property
    def num_layers(self) -> int:
        """Number of layers before the builder fuses any."""
        return int(self._network.num_layers)

    def profile(self, batch: BatchRange) -> Any:
        """Return TensorRT's optimisation profile for batch sizes; all other dimensions are the graph's."""
        profile = self._builder.create_optimization_profile()
        for tensor in self.inputs:
            rest = tensor.shape[1:]
            profile.set_shape(tensor.name, (batch.min, *rest), (batch.opt, *rest), (batch.max, *rest))
        return profile

    def build(
        self, target: EngineTarget, options: BuildOptions, on_progress: OnProgress = lambda *_: None
    ) -> SerializedEngine:
        """Build for one GPU.

        Raises:
            UsageError: the builder fails, or the timing cache cannot be used.
            KeyboardInterrupt: Ctrl-C, or `on_progress` raised it.
        """
        trt = self.library.module
        config = self._builder.create_builder_config()
        self._configure(config, target, options)
        monitor = _make_monitor(trt, on_progress)
        config.progress_monitor = monitor
        self.logger.errors.clear()
        started = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            cache = self._timing_cache(config, options)
            with _interrupt_through(monitor):
                plan = self._builder.build_serialized_network(self._network, config)
            if monitor.interrupted:
                raise KeyboardInterrupt
            if plan is None:
                workspace = "; give more --workspace" if options.workspace is not None else ""
                raise UsageError(
                    f"{self.library.title} could not build the engine for {target.sm}: "
                    f"{first_error(self.logger)}{workspace}; see what it does with --verbose"
                )
            if cache is not None and options.timing_cache is not None:
                with atomic_write(options.timing_cache) as temporary:
                    temporary.write_bytes(bytes(memoryview(cache.serialize())))
        return SerializedEngine(bytes(memoryview(plan)), time.monotonic() - started)

    def _configure(self, config: Any, target: EngineTarget, options: BuildOptions) -> None:
        trt = self.library.module
        # fp32 means TF32 off; the flag is on by default
        config.clear_flag(trt.BuilderFlag.TF32)
        if self.library.name == TENSORRT_RTX:
            capability = "CURRENT" if target.current else target.sm.upper()
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
        config.add_optimization_profile(self.profile(options.batch))
        if options.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        flags = {
            "VERSION_COMPATIBLE": options.version_compatible,
            "STRIP_PLAN": options.strip_weights,
            # a plan without weights must be refittable; identical weights leave the kernels free
            "REFIT_IDENTICAL": options.strip_weights and not options.refit,
            "REFIT": options.refit,
        }
        for flag, enabled in flags.items():
            if enabled:
                config.set_flag(getattr(trt.BuilderFlag, flag))
        if options.hardware_compatible is not None and self.library.name == TENSORRT:
            levels = trt.HardwareCompatibilityLevel
            ampere = options.hardware_compatible == AMPERE_PLUS
            config.hardware_compatibility_level = levels.AMPERE_PLUS if ampere else levels.SAME_COMPUTE_CAPABILITY

    def _timing_cache(self, config: Any, options: BuildOptions) -> Any:
        if options.timing_cache is None:
            return None
        try:
            stored = options.timing_cache.read_bytes() if options.timing_cache.exists() else b""
        except OSError as error:
            raise UsageError(
                f"--timing-cache {options.timing_cache}: cannot be read ({error.strerror or error}); give another file"
            ) from None
        cache = config.create_timing_cache(stored)
        if cache is None or not config.set_timing_cache(cache, False):
            raise UsageError(
                f"{options.timing_cache}: not a timing cache of {self.library.title} on this GPU "
                f"({first_error(self.logger)}); give another file, or delete it"
            )
        return cache

    def _parser_error(self) -> str:
        if not self._parser.num_errors:
            return first_error(self.logger)
        error = self._parser.get_error(0)
        node = error.node_name() or f"node {error.node()}"
        return f"{node} ({error.node_operator() or 'unknown operation'}): {' '.join(str(error.desc()).split())[:300]}"

    @staticmethod
    def _info(tensor: Any) -> TensorInfo:
        return TensorInfo(tensor.name, tensor.dtype.name, tuple(tensor.shape))


@contextmanager
def _interrupt_through(monitor: Any) -> Iterator[None]:
    """Let Ctrl-C end the build through its monitor: nothing may be raised through the native code that is running."""
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
