"""Load and faults for `opal-deploy serve`: start it, let locust load it, and write what happened as JSON.

    python -m tests.load.run soak --model best.onnx --images photographs/ --seconds 600 --out soak.json

- `soak`: users send photographs. See `p99_last_over_first`, `memory`, `wrong`.
- `overload`: the rate that these users reach, then twice that. See `throughput_held`, `refused_429`, `wrong`.
- `hostile`: photographs, then beside broken requests and the images of `--hostile`. See `photographs_beside`.
- `sigterm`: SIGTERM half way. See `lost`, the accepted requests without an answer.

Answers are compared with those of `opal-deploy infer` for the same files, which runs first. locust runs on the same
machine and takes its share of the processors.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

# small enough to be exceeded quickly
LIMITS = ("--max-body", "16", "--upload-timeout", "5", "--request-timeout", "30")
HOSTILE = "hostile: "
# share of a run that is left out at both ends, while users start and stop
_EDGE = 0.1


@dataclass(frozen=True)
class Sent:
    """A request: start (seconds since 1970), kind, milliseconds, HTTP status (0: none), outcome and problem."""

    start: float
    name: str
    ms: float
    status: int
    outcome: str
    problem: str

    @property
    def end(self) -> float:
        return self.start + self.ms / 1e3


def read_log(path: Path) -> list[Sent]:
    """Return the requests in a log of `locustfile`."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [
            Sent(float(row["start"]), row["name"], float(row["ms"]), int(row["status"]), row["outcome"], row["problem"])
            for row in csv.DictReader(stream)
        ]


def summarize(sent: Sequence[Sent], *, edge: float = 0.0) -> dict[str, Any]:
    """Return counts, rates, percentiles of correct answers, and problems, without the edges of the time."""
    if not sent:
        raise SystemExit("no request was sent; see locust's output in --work")
    begin, end = min(one.start for one in sent), max(one.start for one in sent)
    margin = edge * (end - begin)
    seconds = max(end - begin - 2 * margin, 1e-3)
    kept = [one for one in sent if begin + margin <= one.end <= end - margin] if edge else list(sent)
    outcomes = Counter(one.outcome for one in kept)
    right = [one.ms for one in kept if one.outcome == "right"] or [math.nan]
    return {
        "right": outcomes["right"],
        "refused_429": outcomes["refused"],
        "wrong": outcomes["wrong"],
        "right_per_second": round(outcomes["right"] / seconds, 3),
        "offered_per_second": round(len(kept) / seconds, 3),
        **{f"p{share}_ms": round(float(np.percentile(right, share)), 3) for share in (50, 90, 99)},
        "problems": dict(
            Counter(f"{one.name}: {one.problem}" for one in kept if one.outcome == "wrong").most_common(20)
        ),
    }


def p99_last_over_first(sent: Sequence[Sent], window: float) -> float:
    """Return the p99 of the last `window` seconds over that of the first."""
    right = [one for one in sent if one.outcome == "right"]
    begin, end = min(one.start for one in right), max(one.start for one in right)
    first = np.percentile([one.ms for one in right if one.start <= begin + window], 99)
    last = np.percentile([one.ms for one in right if one.start >= end - window], 99)
    return round(float(last / first), 3)


def memory_slope(samples: Sequence[tuple[float, float]], skip: float = 0.2) -> dict[str, float] | None:
    """Return resident megabytes and their least-squares slope per minute after the first `skip` of the time."""
    if len(samples) < 3:
        return None
    times, megabytes = np.array(samples, dtype=np.float64).T
    kept = times >= times[0] + skip * (times[-1] - times[0])
    slope = 60 * np.polyfit(times[kept] - times[0], megabytes[kept], 1)[0]
    values = (megabytes[0], megabytes[-1], megabytes.max(), slope)
    names = ("first_mb", "last_mb", "max_mb", "slope_mb_per_minute")
    return {name: round(float(value), 3) for name, value in zip(names, values, strict=True)}


@dataclass
class Server:
    """A running `serve`, with the memory of all its processes over time: seconds since 1970, megabytes."""

    url: str
    process: subprocess.Popen[bytes]
    samples: list[tuple[float, float]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {"server_survived": self.process.poll() is None, "memory": memory_slope(self.samples)}

    def sample(self, done: threading.Event) -> None:
        """Sample the memory every second."""
        root = psutil.Process(self.process.pid)
        while not done.wait(1.0):
            try:
                resident = sum(process.memory_info().rss for process in (root, *root.children(recursive=True)))
            except psutil.NoSuchProcess:
                continue
            self.samples.append((time.time(), resident / 1e6))


@contextmanager
def serving(options: argparse.Namespace) -> Iterator[Server]:
    """Start the server, wait until it listens, and stop it after the block."""
    log = options.work / "serve.txt"
    command = [sys.executable, "-m", "opal_deploy", "serve", f"model={options.model}", "--port", "0", *LIMITS]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, *options.serve_option], stdout=stream, stderr=stream)
        try:
            while not (found := re.search(r"Listening on (http://\S+)", log.read_text(errors="replace"))):
                if process.poll() is not None:
                    raise SystemExit(f"serve did not start: {log.read_text(errors='replace')[-500:]}")
                time.sleep(0.05)
            server, done = Server(found[1], process), threading.Event()
            threading.Thread(target=server.sample, args=(done,), daemon=True).start()
            yield server
            done.set()
        finally:
            process.terminate()
            process.wait()


class Load:
    """Runs locust against a server; the expected records are made first."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._expected = self._infer(options.images, "expected")
        self._hostile = ["--hostile-expected", self._infer(options.hostile, "hostile")] if options.hostile else []
        self._phases = 0

    def start(self, server: Server, users: int, seconds: float, *more: str) -> Callable[[], list[Sent]]:
        """Start users; return a function that waits for them and returns their requests."""
        self._phases += 1
        log = self.log = self._options.work / f"requests-{self._phases}.csv"
        command = [
            sys.executable, "-m", "locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless",
            "--host", server.url, "--users", str(users), "--spawn-rate", str(users), "--run-time",
            f"{math.ceil(seconds)}s", "--stop-timeout", "60", "--only-summary", "--expected", self._expected,
            "--model-name", "model", "--log", str(log), *self._hostile, *more,
        ]  # fmt: skip
        with (self._options.work / f"locust-{self._phases}.txt").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)

        def wait() -> list[Sent]:
            process.wait()
            return read_log(log) if log.exists() else []

        return wait

    def run(self, server: Server, users: int, seconds: float, *more: str) -> list[Sent]:
        """Let users send for some seconds."""
        return self.start(server, users, seconds, *(more or ("PhotographUser",)))()

    def _infer(self, folder: Path, name: str) -> str:
        out = self._options.work / name
        command = [sys.executable, "-m", "opal_deploy", "infer", str(folder.resolve()), "--out", str(out)]
        # 3: some images have error records, as they should
        done = subprocess.run([*command, "--model", str(self._options.model)], capture_output=True, text=True)
        if done.returncode not in (0, 3):
            raise SystemExit(f"infer {folder}: {done.stderr.strip()[-500:]}")
        return str(out / "results.jsonl")


def soak(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Send photographs for a long time: neither latency nor memory may grow."""
    with serving(options) as server:
        sent = load.run(server, options.users, options.seconds, "PhotographUser")
        window = min(60.0, options.seconds / 3)
        return {**server.describe(), "soak": summarize(sent), "p99_last_over_first": p99_last_over_first(sent, window)}


def overload(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Offer twice what the server can take: its rate of answers must hold, and the rest gets 429."""
    with serving(options) as server:
        load.run(server, options.users, min(options.seconds, 10.0))
        bearable = summarize(load.run(server, options.users, options.seconds), edge=_EDGE)
        rate = max(bearable["right_per_second"], 0.1)
        # two users for each request per second, so that waiting for an answer does not lower the rate
        users = math.ceil(4 * rate)
        double = load.run(server, users, options.seconds, "PhotographUser", "--rate", str(2 * rate / users))
        answered = summarize(double, edge=_EDGE)
        held = round(answered["right_per_second"] / rate, 3)
        after = summarize(load.run(server, options.users, min(options.seconds, 10.0)))
        phases = {"bearable": bearable, "double": answered, "throughput_held": held, "afterwards": after}
        return {**server.describe(), **phases}


def hostile(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Send photographs alone, then beside hostile users: the answers must be the same."""
    with serving(options) as server:
        load.run(server, options.users, min(options.seconds, 10.0))
        alone = load.run(server, options.users, options.seconds)
        users = options.users + options.hostile_users
        each = ("PhotographUser", "HostileUser", "--hostile-users", str(options.hostile_users))
        mixed = load.run(server, users, options.seconds, *each)
        after = load.run(server, options.users, min(options.seconds, 10.0))
        return {
            **server.describe(),
            "photographs_alone": summarize(alone, edge=_EDGE),
            "photographs_beside": summarize([s for s in mixed if not s.name.startswith(HOSTILE)], edge=_EDGE),
            "hostile": summarize([s for s in mixed if s.name.startswith(HOSTILE)]),
            "afterwards": summarize(after),
        }


def sigterm(load: Load, options: argparse.Namespace) -> dict[str, Any]:
    """Send SIGTERM under load: every accepted request is answered; a refused connection is no loss."""
    with serving(options) as server:
        wait = load.start(server, options.users, options.seconds, "PhotographUser", "--close")
        while not (load.log.exists() and load.log.read_bytes().count(b"\n") > 1):
            time.sleep(0.05)
        time.sleep(options.seconds / 2)
        server.process.send_signal(signal.SIGTERM)
        signalled = time.time()
        code, ended = server.process.wait(), time.time()
        sent = wait()
    before = [one for one in sent if one.start < signalled]
    turned_away = [
        one for one in sent if one.start >= signalled and (one.status == 503 or "refused" in one.problem.lower())
    ]
    lost = [one for one in sent if one.outcome == "wrong" and one not in turned_away]
    return {
        "exit_code": code,
        "seconds_to_end": round(ended - signalled, 3),
        "before_signal": summarize(before),
        "in_flight_at_signal": sum(one.end > signalled for one in before),
        "turned_away": len(turned_away),
        "lost": len(lost),
        "losses": [f"{one.start - signalled:+.3f} s, {one.ms:.0f} ms, {one.name}: {one.problem}" for one in lost[:20]],
    }


SCENARIOS = {"soak": soak, "overload": overload, "hostile": hostile, "sigterm": sigterm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--model", type=Path, required=True, help="The model file to serve.")
    parser.add_argument("--images", type=Path, required=True, help="A folder of photographs.")
    parser.add_argument("--hostile", type=Path, help="A folder of broken, huge or odd images.")
    parser.add_argument("--seconds", type=float, default=60.0, help="Length of each phase.")
    parser.add_argument("--users", type=int, default=8, help="Users that send photographs.")
    parser.add_argument("--hostile-users", type=int, default=8)
    parser.add_argument("--serve-option", action="append", default=[], help="More for serve, such as --batch=16.")
    parser.add_argument("--work", type=Path, help="Folder for logs; default: a temporary one.")
    parser.add_argument("--out", type=Path, help="File for the summary; default: stdout.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="opal-load-") as scratch:
        options.work = options.work or Path(scratch)
        options.work.mkdir(parents=True, exist_ok=True)
        figures = SCENARIOS[options.scenario](Load(options), options)
    text = json.dumps({"scenario": options.scenario, "users": options.users, **figures}, indent=1)
    print(text) if options.out is None else options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
