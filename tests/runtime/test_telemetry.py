"""ONNX Runtime's telemetry, which its makers switch on."""

import os
import subprocess
import sys

_PREDICT = "import sys, opal_deploy; opal_deploy.load(sys.argv[1], device='cpu')"


def test_a_session_leaves_no_events_for_onnx_runtimes_makers(exact_model, tmp_path):
    # it is off in CI and in tests, too
    switches = {"CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME"}
    environment = {name: value for name, value in os.environ.items() if name not in switches}
    # nothing gets out
    environment |= {"https_proxy": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", _PREDICT, exact_model], env=environment, check=True, timeout=120)
    assert [path for path in tmp_path.rglob("*") if "onnxruntime" in path.name] == []
