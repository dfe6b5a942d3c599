"""Users for locust: photographs that must get correct answers, and hostile requests.

    locust -f tests/load/locustfile.py PhotographUser --headless --host http://127.0.0.1:8000 --users 8 --run-time 60s \
        --expected results.jsonl --root images/ --model-name best

Each request becomes a line in --log: start, name, milliseconds, status, outcome and problem. A reply is wrong if a good
image does not get the record of --expected, or a bad one gets neither 4xx nor an error record, each with a reason. 429
is a correct answer under overload.
"""

from __future__ import annotations

import csv
import json
import random
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import urlsplit

from locust import FastHttpUser, events, task
from locust.env import Environment

from tests.load.hostile import REQUESTS, build_infer, infer_path

# the batch size may change the last bits
_TOLERANCE = 1e-4
# seconds between attempts to reach a stopped server
_PAUSE = 0.2
# errors that depend on how busy the machine is
_NOT_REPEATABLE = ("decode_timeout", "decoder_crashed")

Record = dict[str, Any]


@events.init_command_line_parser.add_listener
def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--expected", help="results.jsonl of `opal-deploy infer` for the photographs.")
    parser.add_argument("--hostile-expected", default="", help="The same for the hostile images.")
    parser.add_argument("--root", default=".", help="The folder that the names in them are relative to.")
    parser.add_argument("--model-name", help="The model's name in the server.")
    parser.add_argument("--log", help="CSV that gets a line for each request.")
    parser.add_argument("--rate", type=float, default=0.0, help="Photographs a second of each user; 0: one by one.")
    parser.add_argument("--hostile-users", type=int, default=0, help="So many of --users are hostile.")
    parser.add_argument("--close", action="store_true", help="A connection for each request.")


class Log:
    """The lines of all requests: start (seconds since 1970), name, milliseconds, status, outcome, problem."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._writer = stream, csv.writer(stream)
        self._writer.writerow(["start", "name", "ms", "status", "outcome", "problem"])

    def add(self, *, start_time: float, name: str, response_time: float, exception: object, **more: Any) -> None:
        """Write a line, for the event `request`."""
        status = getattr(more.get("response"), "status_code", None) or more.get("context", {}).get("status", 0)
        outcome = "wrong" if exception else "refused" if status == 429 else "right"
        problem = " ".join(f"{type(exception).__name__}: {exception}".split())[:300] if exception else ""
        self._writer.writerow([f"{start_time:.4f}", name, f"{response_time:.2f}", status, outcome, problem])

    def close(self, **_: Any) -> None:
        """Write what is left."""
        self._stream.close()


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    assert options is not None  # locust was started by its command
    HostileUser.fixed_count = options.hostile_users
    if options.log:
        log = Log(open(options.log, "w", encoding="utf-8", newline="", buffering=1))  # noqa: SIM115  closed at the end
        events.request.add_listener(log.add)
        events.quit.add_listener(log.close)
    PhotographUser.images = list(_read_images(options.expected, Path(options.root)))
    HostileUser.images = list(_read_images(options.hostile_expected, Path(options.root)))
    if not HostileUser.images:
        HostileUser.tasks = [HostileUser.break_protocol]


def _read_images(results: str, root: Path) -> Iterator[tuple[bytes, Record]]:
    """Yield the bytes of each image with the record that `infer` gave it."""
    if results:
        for line in Path(results).read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            yield (root / record["image"]).read_bytes(), record


def compare(record: Record, expected: Record) -> str:
    """Return what is wrong with a record; empty if it is the expected one."""
    if record["status"] != expected["status"]:
        return f"status {record['status']} found, {expected['status']} expected"
    if "error" in expected:
        codes = record["error"]["code"], expected["error"]["code"]
        if codes[0] == codes[1] or any(code in _NOT_REPEATABLE for code in codes):
            return "" if record["error"]["message"] else "an error without a reason"
        return f"code {codes[0]} found, {codes[1]} expected"
    found, right = ([record[0]["prediction"], *record[0]["evidence"]] for record in ([record], [expected]))
    for mine, theirs in zip(found, right, strict=True):
        for key, value in theirs.items():
            close = isinstance(value, float) and abs(mine[key] - value) <= _TOLERANCE
            if not close and mine[key] != value:
                return f"{key} {mine[key]} found, {value} expected"
    return ""


class _ImageUser(FastHttpUser):
    """Sends images that `infer` answered before, to both addresses that take them."""

    abstract = True
    images: list[tuple[bytes, Record]]
    connection_timeout = network_timeout = 60.0

    @property
    def _options(self) -> Any:
        return self.environment.parsed_options

    def explain(self) -> None:
        """Send an image as people's programs do: its bytes, for its record."""
        data, expected = random.choice(self.images)

        def read(response: Any) -> Record:
            document = json.loads(response.content)
            record: Record = document.get("record", document)
            return record

        allowed = range(400, 500) if "error" in expected else (200,)
        self._post("explain", "/explain", data, {}, expected, allowed, read)

    def infer(self) -> None:
        """Send a image by the Open Inference Protocol, in binary."""
        data, expected = random.choice(self.images)
        body, size = build_infer(data)

        def read(response: Any) -> Record:
            size = int(response.headers["Inference-Header-Content-Length"])
            # the only tensor: the length of its only element, and the element
            record: Record = json.loads(response.content[size + 4 :])
            return record

        headers = {"Inference-Header-Content-Length": str(size)}
        self._post("v2 infer", infer_path(self._options.model_name), body, headers, expected, (200,), read)

    def _post(
        self,
        name: str,
        path: str,
        body: bytes,
        headers: dict[str, str],
        expected: Record,
        allowed: range | tuple[int, ...],
        read: Callable[[Any], Record],
    ) -> None:
        if self._options.close:
            headers = {**headers, "Connection": "close"}
        name = name if type(self) is PhotographUser else f"hostile: {name}"
        # locust's types know no bytes
        with self.client.post(path, data=cast(str, body), headers=headers, name=name, catch_response=True) as response:
            if response.status_code == 429:
                if not response.headers.get("Retry-After") or not json.loads(response.content).get("error"):
                    response.failure("429 without Retry-After or a reason")
                else:
                    response.success()
            elif response.status_code == 0:
                # the client's own exception is in the log
                time.sleep(_PAUSE)
            elif response.status_code not in allowed:
                response.failure(f"{response.status_code}: {bytes(response.content or b'')[:200]!r}")
            else:
                problem = compare(read(response), expected)
                response.failure(problem) if problem else response.success()


class PhotographUser(_ImageUser):
    """Sends photographs at --rate, or one after the other."""

    _due = 0.0

    def wait_time(self) -> float:
        """Return the seconds until the next one is due; late requests are not made up for."""
        rate: float = self._options.rate
        if not rate:
            return 0.0
        now = time.perf_counter()
        self._due = max((self._due or now - random.random() / rate) + 1 / rate, now)
        return self._due - now

    explain = task(_ImageUser.explain)
    infer = task(_ImageUser.infer)


class HostileUser(_ImageUser):
    """Sends broken images and broken requests."""

    def wait_time(self) -> float:
        """Return the seconds until the next request."""
        return 0.1

    explain = task(_ImageUser.explain)
    infer = task(_ImageUser.infer)

    @task(2)
    def break_protocol(self) -> None:
        """Send one of `hostile.REQUESTS` over a raw socket."""
        request = random.choice(REQUESTS)
        address = urlsplit(self.host or "")
        start, clock, error = time.time(), time.perf_counter(), None
        try:
            problem = request.send(address.hostname or "", address.port or 80, self._options.model_name)
            error = AssertionError(problem) if problem else None
        except OSError as failure:
            error = failure  # type: ignore[assignment]
        self.environment.events.request.fire(
            request_type="RAW", name=f"hostile: {request.name}", start_time=start, response_length=0,
            response_time=1e3 * (time.perf_counter() - clock), exception=error, response=None, context={},
        )  # fmt: skip
