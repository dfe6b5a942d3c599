"""The health check of a container: `python -m opal_deploy.server.health`.

A container whose main process is `opal-deploy serve` is healthy while `/v2/health/live` answers 200; with any other
command it is healthy as long as it runs.
"""

from __future__ import annotations

import argparse
import http.client
from collections.abc import Sequence
from pathlib import Path

# seconds; even a busy server answers in milliseconds
_TIMEOUT = 5.0
_LOCAL = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def check_health(command: Sequence[str]) -> str | None:
    """Return the problem in one line of the server that a command line started; None if healthy, or no server."""
    words = iter(command)
    # Python or an init process may come first
    if not any(Path(word).name == "opal-deploy" for word in words):
        return None
    if next((word for word in words if not word.startswith("-")), None) != "serve":
        return None
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options, _ = parser.parse_known_args(list(words))
    # urllib would use the environment's proxy
    connection = http.client.HTTPConnection(_LOCAL.get(options.host, options.host), options.port, timeout=_TIMEOUT)
    try:
        connection.request("GET", "/v2/health/live")
        response = connection.getresponse()
        body = response.read(1000).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{options.host}:{options.port} does not answer: {error or type(error).__name__}"
    finally:
        connection.close()
    return None if response.status == http.client.OK else f"{options.host}:{options.port}: {response.status}: {body}"


if __name__ == "__main__":
    main_process = Path("/proc/1/cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    raise SystemExit(check_health(main_process))
