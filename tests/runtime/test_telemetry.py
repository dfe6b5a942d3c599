"""ONNX Runtime's telemetry, which its makers switch on."""

import os
import subprocess
import sys

import pytest

_OPEN = "import sys, onnxruntime; onnxruntime.InferenceSession(sys.argv[1])"
_PREDICT = "import sys, opal_deploy; opal_deploy.load(sys.argv[1], device='cpu')"


@pytest.mark.parametrize(("code", "silent"), [(_PREDICT, True), (_OPEN, False)], ids=["opal_deploy", "onnxruntime"])
def test_a_session_leaves_no_events_for_onnx_runtimes_makers(exact_model, tmp_path, code, silent):
    # it is off in CI and in tests, too
    switches = {"CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    # nothing gets out
    environment["https_proxy"] = "http://127.0.0.1:9"
    command = [sys.executable, "-c", code, exact_model]
    subprocess.run(command, env=environment | {"HOME": str(tmp_path)}, check=True, timeout=120)
    written = [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name]
    if not silent and not written:
        pytest.skip("this build of ONNX Runtime has no telemetry")
    assert bool(written) != silent
