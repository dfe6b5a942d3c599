"""The scenarios: what is sent, for how long, and what must hold."""

from __future__ import annotations

import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from opal_deploy._version import __version__
from opal_deploy.artifact.files import compute_sha256
from opal_deploy.bench.load.analysis import (
    Sent,
    memory_slope,
    p99_last_over_first,
    read_log,
    split_hostile,
    summarize,
)
from opal_deploy.bench.load.server import LIMITS, MODEL_NAME, Server
from opal_deploy.errors import StoppedEarly
from opal_deploy.inference.run_files import RESULTS
from opal_deploy.runtime.devices import available_cpus

# not imported: locust would put its own sockets and threads into this process
_LOCUSTFILE = Path(__file__).with_name("locustfile.py")
# users for each request a second
_OVERLOAD_USERS = 2
# of a run, at both ends: users start, and answers are on their way
_EDGE = 0.1


@dataclass(frozen=True)
class LoadOptions:
    """What a scenario needs.

    Attributes:
        model: the file that is served.
        images: a folder of photographs.
        hostile: a folder of pictures that are no good; None: broken requests alone.
        seconds: of each phase.
        users: that send photographs one after the other.
        hostile_users: beside them.
        draw: share of the soak's requests to `/explain` that ask for an evidence sheet.
        work: an empty folder for logs.
        serve_options: more options of `serve`.
    """

    model: Path
    images: Path
    hostile: Path | None
    seconds: float
    users: int
    hostile_users: int
    draw: float
    work: Path
    serve_options: Sequence[str] = ()


@dataclass
class Phase:
    """One run of locust."""

    sent: list[Sent]
    seconds: float
    cpu_seconds: float

    def describe(self) -> dict[str, Any]:
        return {"seconds": round(self.seconds, 1), "load_generator_cpu_seconds": round(self.cpu_seconds, 1)}


class Load:
    """Runs locust against a server; the records to expect are made beforehand."""

    def __init__(self, options: LoadOptions) -> None:
        self._options = options
        self._expected = self._infer(options.images, "expected")
        self._hostile = self._infer(options.hostile, "hostile") if options.hostile else None
        self._phases = 0

    def start(self, server: Server, users: int, seconds: float, *more: str) -> Callable[[], Phase]:
        """Start users; return what waits for them and gives what they got."""
        self._phases += 1
        log = self._log = self._options.work / f"requests-{self._phases}.csv"
        hostile = ["--hostile-expected", str(self._hostile)] if self._hostile else []
        command = [
            sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE), "--headless", "--host", server.url,
            "--users", str(users), "--spawn-rate", str(max(users, 1)), "--run-time", f"{math.ceil(seconds)}s",
            "--stop-timeout", "60", "--only-summary", "--expected", str(self._expected), *hostile,
            "--model-name", MODEL_NAME, "--log", str(log), *more,
        ]  # fmt: skip
        before, started = _children_cpu(), time.monotonic()
        output = (self._options.work / f"locust-{self._phases}.txt").open("wb")
        process = self._process = subprocess.Popen(command, stdout=output, stderr=output)

        def wait() -> Phase:
            process.wait()
            output.close()
            if not log.exists():
                raise StoppedEarly(f"locust did not start: {Path(output.name).read_text()[-500:]}")
            sent = read_log(log)
            span = max((one.end for one in sent), default=0.0) - min((one.start for one in sent), default=0.0)
            return Phase(sent, min(span, time.monotonic() - started), _children_cpu() - before)

        return wait

    def wait_for_answers(self) -> None:
        """Wait until the users that were started last have answers, or are gone."""
        while self._process.poll() is None and not (self._log.exists() and self._log.read_bytes().count(b"\n") > 1):
            time.sleep(0.05)

    def run(self, server: Server, users: int, seconds: float, *more: str) -> Phase:
        """Let users send for so many seconds."""
        return self.start(server, users, seconds, *more)()

    def _infer(self, folder: Path, name: str) -> Path:
        out = self._options.work / name
        command = [sys.executable, "-m", "opal_deploy", "infer", str(folder.resolve()), "--out", str(out)]
        # 3: some have error records, as they should
        done = subprocess.run([*command, "--model", str(self._options.model)], capture_output=True, text=True)
        if done.returncode not in (0, 3):
            raise StoppedEarly(f"infer {folder}: {done.stderr.strip()[-500:]}")
        return out / RESULTS


def soak(load: Load, options: LoadOptions) -> dict[str, Any]:
    """Photographs alone for a long time: latency and memory must not grow."""
    with _server(options) as server:
        phase = load.run(server, options.users, options.seconds, "PhotographUser", "--draw", str(options.draw))
        alive = server.is_running
    window = min(60.0, phase.seconds / 3)
    return {
        **_server_figures(server, alive),
        "soak": {**phase.describe(), **summarize(phase.sent, phase.seconds)},
        "p99_last_over_first": p99_last_over_first(phase.sent, window),
    }


def overload(load: Load, options: LoadOptions) -> dict[str, Any]:
    """Twice what the server can bear: what it answers must not drop, and the rest gets 429."""
    with _server(options) as server:
        load.run(server, options.users, min(options.seconds, 10.0), "PhotographUser")
        bearable = load.run(server, options.users, options.seconds, "PhotographUser")
        rate = summarize(_inner(bearable.sent), _inner_seconds(bearable.sent))["right_per_second"]
        # each sends less than its share, so that waiting for an answer lowers the rate of none
        users = math.ceil(2 * rate * _OVERLOAD_USERS)
        each = str(2 * rate / users)
        double = load.run(server, users, options.seconds, "PhotographUser", "--rate", each)
        alive = server.is_running
        after = load.run(server, options.users, min(options.seconds, 10.0), "PhotographUser")
    answered = summarize(_inner(double.sent), _inner_seconds(double.sent))
    return {
        **_server_figures(server, alive),
        "bearable": {**bearable.describe(), **summarize(_inner(bearable.sent), _inner_seconds(bearable.sent))},
        "double": {"users": users, **double.describe(), **answered},
        "throughput_held": round(answered["right_per_second"] / rate, 3) if rate else None,
        "afterwards": summarize(after.sent, after.seconds),
    }


def hostile(load: Load, options: LoadOptions) -> dict[str, Any]:
    """Photographs alone, then beside hostile users: their answers must be the same."""
    with _server(options) as server:
        load.run(server, options.users, min(options.seconds, 10.0), "PhotographUser")
        alone = load.run(server, options.users, options.seconds, "PhotographUser")
        mixed = load.run(
            server, options.users + options.hostile_users, options.seconds,
            "PhotographUser", "HostileUser", "--hostile-users", str(options.hostile_users),
        )  # fmt: skip
        alive = server.is_running
        after = load.run(server, options.users, min(options.seconds, 10.0), "PhotographUser")
    good, bad = split_hostile(mixed.sent)
    return {
        **_server_figures(server, alive),
        "photographs_alone": {**alone.describe(), **summarize(_inner(alone.sent), _inner_seconds(alone.sent))},
        "photographs_beside": {**mixed.describe(), **summarize(_inner(good), _inner_seconds(good))},
        # slow ones take longer than the photographs
        "hostile": {"users": options.hostile_users, **summarize(bad, mixed.seconds)},
        "afterwards": summarize(after.sent, after.seconds),
    }


def sigterm(load: Load, options: LoadOptions) -> dict[str, Any]:
    """SIGTERM under load: whatever was accepted is answered. A connection refused is no loss."""
    with _server(options) as server:
        wait = load.start(server, options.users, options.seconds, "PhotographUser", "--close")
        load.wait_for_answers()
        time.sleep(options.seconds / 2)
        signalled = server.terminate()
        code, ended = server.wait()
        phase = wait()
    before = [one for one in phase.sent if one.start < signalled]
    after = [one for one in phase.sent if one.start >= signalled]
    refused = [one for one in after if "refused" in one.problem.lower()]
    stopping = [one for one in after if one.status == 503]
    lost = [one for one in phase.sent if one.outcome == "wrong" and one not in refused and one not in stopping]
    return {
        **_server_figures(server, alive=True),
        "exit_code": code,
        "seconds_to_end": round(ended - signalled, 3),
        "before_signal": summarize(before, max(signalled - before[0].start, 1e-3)) if before else None,
        "in_flight_at_signal": sum(one.end > signalled for one in before),
        "after_signal": {
            "answered": sum(one.outcome == "right" for one in after),
            "connections_refused": len(refused),
            "unavailable_503": len(stopping),
        },
        "lost": len(lost),
        "losses": [f"{one.start - signalled:+.3f} s, {one.ms:.0f} ms, {one.name}: {one.problem}" for one in lost[:20]],
    }


SCENARIOS: dict[str, Callable[[Load, LoadOptions], dict[str, Any]]] = {
    "soak": soak, "overload": overload, "hostile": hostile, "sigterm": sigterm,
}  # fmt: skip


def run_scenario(name: str, options: LoadOptions) -> dict[str, Any]:
    """Run a scenario and return its summary.

    Raises:
        StoppedEarly: the server or the load generator did not start.
    """
    options.work.mkdir(parents=True, exist_ok=True)
    load = Load(options)
    before = _children_cpu()
    figures = SCENARIOS[name](load, options)
    return {
        "scenario": name,
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "opal_deploy": __version__,
        "model": options.model.name,
        "model_sha256": compute_sha256(options.model),
        "images": options.images.name,
        "hostile_pictures": options.hostile.name if options.hostile else None,
        "users": options.users,
        "draw": options.draw,
        "serve_options": [*LIMITS, *options.serve_options],
        "machine": {"cpus": available_cpus(), "processor": platform.machine(), "load_average": os.getloadavg()},
        "load_generator": f"locust {version('locust')}, on the same machine: it takes processor time from the server",
        "all_cpu_seconds": round(_children_cpu() - before, 1),
        **figures,
    }  # fmt: skip


def _server(options: LoadOptions) -> Server:
    return Server(options.model, options.work / "serve.txt", options.serve_options)


def _server_figures(server: Server, alive: bool) -> dict[str, Any]:
    return {
        "server_survived": alive,
        "seconds_to_start": round(server.seconds_to_start, 2),
        "server_cpu_seconds": round(server.cpu_seconds, 1),
        "memory": memory_slope(server.samples),
    }


def _inner(sent: Sequence[Sent]) -> list[Sent]:
    """Return the requests without those of both edges of the time."""
    begin, end = _span(sent)
    return [one for one in sent if begin + _EDGE * (end - begin) <= one.end <= end - _EDGE * (end - begin)]


def _inner_seconds(sent: Sequence[Sent]) -> float:
    begin, end = _span(sent)
    return (1 - 2 * _EDGE) * (end - begin)


def _span(sent: Sequence[Sent]) -> tuple[float, float]:
    if not sent:
        raise StoppedEarly("no request was sent; see locust's output in the folder of logs")
    # the last to be sent: afterwards the load is not what it was
    return min(one.start for one in sent), max(one.start for one in sent)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
