"""What a session does with an engine: the same answers as the ONNX file it was built from, in any batch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opal_deploy.artifact.outputs import Outputs
from opal_deploy.errors import ArtifactError, StoppedEarly, UsageError
from opal_deploy.export.checkpoint_source import CheckpointSource
from opal_deploy.export.exporter import export
from opal_deploy.export.options import ExportOptions, ExportTargets
from opal_deploy.runtime.onnx_session import OnnxSession
from opal_deploy.synthetic import example_images

SIZE = (64, 96)


@pytest.fixture(scope="module")
def pictures() -> Any:
    return example_images(11, *SIZE)


@pytest.fixture(scope="module")
def float_input(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("float") / "c.onnx"
    options = ExportOptions(input_kind="float32", attention=True, threads=2)
    export(CheckpointSource(tiny.checkpoint, out), ExportTargets({"fp32": out}), options)
    return out


def assert_same(found: Outputs, expected: Outputs) -> None:
    np.testing.assert_allclose(found.logits, expected.logits, atol=2e-3)
    np.testing.assert_allclose(found.scores, expected.scores, atol=2e-3)
    assert (found.argmax == expected.argmax).mean() > 0.97
    assert found.argmax.dtype == np.int32
    assert (found.attention is None) == (expected.attention is None)
    if found.attention is not None and expected.attention is not None:
        np.testing.assert_allclose(found.attention, expected.attention, atol=2e-3)


class TestAnswers:
    @pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 11])
    @pytest.mark.parametrize("batch", [(1, 2, 4), (3, 4, 4), (4, 4, 4), (1, 1, 1)], ids=str)
    def test_any_number_of_pictures_is_answered_as_by_onnx_runtime(
        self, open_engine_for: Callable[..., Any], tiny_fp16: Path, pictures: Any, count: int, batch: Any
    ) -> None:
        session = open_engine_for(tiny_fp16, batch)
        expected = OnnxSession(tiny_fp16, device="cpu", threads=1).run(pictures[:count])
        assert_same(session.run(pictures[:count]), expected)
        session.close()

    def test_a_normalised_input_and_the_attention_maps(
        self, open_engine_for: Callable[..., Any], float_input: Path, pictures: Any
    ) -> None:
        session = open_engine_for(float_input, (1, 2, 4))
        assert_same(session.run(pictures[:7]), OnnxSession(float_input, device="cpu", threads=1).run(pictures[:7]))

    def test_answers_stay_what_they_were_when_the_next_are_computed(
        self, open_engine_for: Callable[..., Any], tiny_fp16: Path, pictures: Any
    ) -> None:
        session = open_engine_for(tiny_fp16, (1, 2, 4))
        first = session.run(pictures[:3])
        before = first.logits.copy()
        session.run(pictures[3:9])
        np.testing.assert_array_equal(first.logits, before)

    def test_another_thread_may_run_it(
        self, open_engine_for: Callable[..., Any], tiny_fp16: Path, pictures: Any
    ) -> None:
        session = open_engine_for(tiny_fp16, (1, 2, 4))
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(session.run, pictures[:5]).result()
        assert_same(found, OnnxSession(tiny_fp16, device="cpu", threads=1).run(pictures[:5]))

    def test_cuda_graphs_change_no_answer(
        self, open_engine_for: Callable[..., Any], tiny_fp16: Path, pictures: Any
    ) -> None:
        session = open_engine_for(tiny_fp16, (1, 2, 4), cuda_graphs=True)
        plain = OnnxSession(tiny_fp16, device="cpu", threads=1)
        # the second and third time from recorded graphs, in both sets of buffers
        for count in (8, 8, 8, 3, 11):
            assert_same(session.run(pictures[:count]), plain.run(pictures[:count]))

    def test_the_callers_bugs_are_the_callers(self, stand: Any, pictures: Any) -> None:
        session = stand.open()
        with pytest.raises(ValueError, match="expected uint8"):
            session.run(pictures.astype(np.float32))


class TestBuffers:
    def test_a_fixed_batch_is_filled_up(self, make_stand: Callable[..., Any], pictures: Any) -> None:
        stand = make_stand(batch=(4, 4, 4))
        session = stand.open()
        stand.trt.executed.clear()
        session.run(pictures[:6])
        assert stand.trt.executed == [4, 4]

    def test_more_than_fits_goes_in_parts(self, stand: Any, pictures: Any) -> None:
        session = stand.open()
        stand.trt.executed.clear()
        session.run(pictures[:11])
        assert stand.trt.executed == [4, 4, 3]

    def test_the_next_part_is_queued_before_the_last_is_collected(self, stand: Any, pictures: Any) -> None:
        session = stand.open()
        order: list[str] = []
        collect, start = session._collect, session._start
        session._collect = lambda slot: (order.append("collect"), collect(slot))[1]
        session._start = lambda slot, images: (order.append("start"), start(slot, images))[1]
        session.run(pictures[:11])
        assert order == ["start", "start", "collect", "start", "collect", "collect"]

    def test_graphs_of_the_first_size_are_recorded_once_a_set_of_buffers(self, stand: Any, pictures: Any) -> None:
        session = stand.open(cuda_graphs=True)
        assert stand.cudart.launched == 0, "the test vectors must not decide which size is recorded"
        for _ in range(3):
            session.run(pictures[:8])
        # two parts of four each time
        assert stand.cudart.launched == 6
        session.run(pictures[:3])
        assert stand.cudart.launched == 6

    def test_without_room_for_a_second_context_nothing_is_recorded(
        self, stand: Any, tiny_fp16: Path, pictures: Any
    ) -> None:
        session = stand.open(cuda_graphs=True)
        stand.trt.no_room = True
        found = session.run(pictures[:8])
        assert_same(found, OnnxSession(tiny_fp16, device="cpu", threads=1).run(pictures[:8]))
        assert stand.cudart.launched == 0

    def test_tensorrt_for_rtx_records_by_itself(self, make_stand: Callable[..., Any], pictures: Any) -> None:
        stand = make_stand(rtx=True)
        stand.open(cuda_graphs=True).run(pictures[:8])
        assert stand.trt.strategies == ["whole"]
        assert stand.cudart.launched == 0

    def test_closing_gives_all_memory_back(self, stand: Any, pictures: Any) -> None:
        session = stand.open()
        session.run(pictures[:3])
        assert stand.cudart.memory
        session.close()
        assert not stand.cudart.memory
        assert not stand.cudart.streams


class TestFailures:
    def test_a_failed_execution_can_be_resumed_and_the_next_batch_is_right(
        self, stand: Any, tiny_fp16: Path, pictures: Any
    ) -> None:
        session = stand.open()
        stand.trt.fail_execution = 1
        with pytest.raises(StoppedEarly, match="failed on a batch of 3 on NVIDIA L4: Cask convolution") as stop:
            session.run(pictures[:3])
        assert stop.value.exit_code == 5
        assert_same(session.run(pictures[4:7]), OnnxSession(tiny_fp16, device="cpu", threads=1).run(pictures[4:7]))

    @pytest.mark.parametrize(
        "function", ["cudaMemcpyAsync", "cudaEventSynchronize", "cudaSetDevice", "cudaEventRecord"]
    )
    def test_a_lost_device_is_one_line_with_cudas_words(self, stand: Any, pictures: Any, function: str) -> None:
        session = stand.open()
        stand.cudart.fail(function)
        with pytest.raises(StoppedEarly, match=rf"CUDA device 0: {function} failed: launch failure \(719\)"):
            session.run(pictures[:3])

    @pytest.mark.parametrize("function", ["cudaMalloc", "cudaHostAlloc"])
    def test_memory_that_is_full_says_what_to_do(self, make_stand: Callable[..., Any], function: str) -> None:
        stand = make_stand(batch=(1, 64, 256))
        stand.cudart.fail(function, 2)
        wanted = rf"no room for batches of up to 256 .*{function} failed: out of memory.*--rebuild --batch 16:32:64"
        with pytest.raises(UsageError, match=wanted):
            stand.open()

    def test_an_engine_that_does_not_fit_the_memory_says_so(self, stand: Any) -> None:
        stand.trt.no_room = True
        with pytest.raises(
            UsageError, match=r"no room .* on NVIDIA L4 \(24 GiB\).*could not be allocated.*--batch 1:1:1"
        ):
            stand.open()

    def test_a_plan_that_the_library_refuses_is_one_line(self, stand: Any) -> None:
        stand.trt.refuse = "Version tag does not match"
        with pytest.raises(ArtifactError, match=r"refuses the engine \(Version tag.*--trt --rebuild"):
            stand.open()

    def test_an_engine_with_other_tensors_than_promised_is_refused(
        self, make_stand: Callable[..., Any], float_input: Path, tiny_fp16: Path
    ) -> None:
        stand = make_stand(float_input)
        stand.onnx = tiny_fp16
        stand.describe()
        with pytest.raises(ArtifactError, match=r"the engine's tensors are .*images float32.*promises .*images uint8"):
            stand.open()

    def test_no_such_device(self, stand: Any) -> None:
        with pytest.raises(UsageError, match=r"device cuda:3: CUDA sees 1 GPUs"):
            stand.open(device="cuda:3")

    def test_the_cpu_is_no_place_for_an_engine(self, stand: Any) -> None:
        with pytest.raises(UsageError, match=r"NVIDIA GPU only.*c\.fp16\.onnx"):
            stand.open(device="cpu")

    def test_a_driver_that_cuda_cannot_use_is_one_line(self, stand: Any) -> None:
        stand.cudart.fail("cudaGetDeviceCount", 35)
        with pytest.raises(UsageError, match="CUDA driver version is insufficient"):
            stand.open()


class TestStandIns:
    """They show what goes wrong on a GPU, and have no name that the real bindings lack."""

    @pytest.mark.parametrize("forgotten", ["wait", "join_event"])
    def test_a_session_that_does_not_wait_gets_wrong_answers(
        self, stand: Any, tiny_fp16: Path, pictures: Any, forgotten: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # or else the tests above would prove nothing about order
        session = stand.open()
        monkeypatch.setattr(session._cuda, forgotten, lambda *_: None)
        expected = OnnxSession(tiny_fp16, device="cpu", threads=1).run(pictures[:8])
        assert np.abs(session.run(pictures[:8]).logits - expected.logits).max() > 1e-2

    def test_cuda(self, stand: Any) -> None:
        real = pytest.importorskip("cuda.bindings.runtime")
        names = [name for name in dir(stand.cudart) if name.startswith("cuda")]
        assert len(names) > 20
        assert [name for name in names if not hasattr(real, name)] == []
        assert hasattr(real.cudaMemcpyKind, "cudaMemcpyHostToDevice")
        assert hasattr(real.cudaMemcpyKind, "cudaMemcpyDeviceToHost")
        assert hasattr(real.cudaStreamCaptureMode, "cudaStreamCaptureModeThreadLocal")

    def test_tensorrt(self, make_stand: Callable[..., Any], fakes: Any) -> None:
        real = pytest.importorskip("tensorrt_rtx")
        trt = make_stand(rtx=True).trt
        for name in ("ILogger", "Runtime", "Refitter", "OnnxParserRefitter", "CudaGraphStrategy", "nptype"):
            assert hasattr(real, name), name
            assert hasattr(trt, name), name
        assert hasattr(real.CudaGraphStrategy, "WHOLE_GRAPH_CAPTURE")
        pairs = [
            (trt.Runtime, real.Runtime),
            (trt.Refitter, real.Refitter),
            (trt.OnnxParserRefitter, real.OnnxParserRefitter),
            (fakes.FakeEngine, real.ICudaEngine),
            (fakes.FakeContext, real.IExecutionContext),
        ]
        for ours, theirs in pairs:
            methods = [name for name in vars(ours) if not name.startswith("_")]
            assert methods
            assert [name for name in methods if not hasattr(theirs, name)] == []
        assert hasattr(real.Runtime, "engine_host_code_allowed")
        assert hasattr(real.ICudaEngine, "num_io_tensors")
        assert hasattr(real.IRuntimeConfig, "cuda_graph_strategy")
