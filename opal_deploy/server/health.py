"""The health check of a container: `python -m opal_deploy.server.health`.

A container that runs `opal-deploy serve` as its main process is healthy while the server answers `/v2/health/live`. Any
other command, such as `infer`, has no address to ask, and is healthy as long as it runs.
"""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Sequence
from pathlib import Path

# seconds; the server answers in milliseconds even when all its requests are in work
_TIMEOUT = 5.0
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_health(command: Sequence[str]) -> str | None:
    """Ask the server whose process was started with `command`, a program and its arguments.

    Returns:
        None if the server answers 200, or if `command` is not `opal-deploy serve`; else the reason, in one line.
    """
    words = iter(command)
    # behind Python, or an init process
    if not any(Path(word).name == "opal-deploy" for word in words):
        return None
    if next((word for word in words if not word.startswith("-")), None) != "serve":
        return None
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options, _ = parser.parse_known_args(list(words))
    # not urllib, which would ask a proxy of the environment for this address too
    connection = http.client.HTTPConnection(_LOCAL.get(options.host, options.host), options.port, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/v2/health/live")
        response = connection.getresponse()
        body = response.read(1000).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{options.host}:{options.port} does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    if response.status == http.client.OK:
        return None
    return f"{options.host}:{options.port} answers {response.status}: {body}"


if __name__ == "__main__":
    main_process = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    raise SystemExit(check_health(main_process))
