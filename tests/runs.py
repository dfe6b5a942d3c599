"""Runs of `infer` in processes of their own, and an image that kills the process that decodes it."""

import json
import os
import subprocess
import sys

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from tests.bright import wait_until
from tests.cli.calls import MAIN

# in place of a decoder or a runtime that ends its process: decoding is not isolated in these tests
KILLER = """
import os, signal
from PIL import Image
opened = Image.open
def open(file, *how):
    image = opened(file, *how)
    if image.info.get("killer"):
        os.kill(os.getpid(), signal.SIGKILL)
    return image
Image.open = open
"""

# a process waits after 40 images or drawings of them while the file SLOW exists, so that no run ends before a test ends
# it; some records are written before
SLOWER = """
import itertools, os, time
from PIL import Image
fast, calls = Image.open, itertools.count()
def slow(file, *how):
    while next(calls) >= 40 and os.path.exists(os.environ["SLOW"]):
        time.sleep(0.05)
    return fast(file, *how)
Image.open = slow
"""


def make_killer(path):
    """Let a PNG image kill the process that decodes it, if that has `KILLER` as its sitecustomize.py."""
    text = PngInfo()
    text.add_text("killer", "yes")
    with Image.open(path) as image:
        image.save(path, pnginfo=text)


class Infer:
    """`infer` on some images, which the folder `cwd` has under the name `in`; `fixed`: what each run is given."""

    def __init__(self, cwd, model, images):
        self.cwd = cwd
        self.processes = []
        (cwd / "in").symlink_to(images)
        self.fixed = ["in", "--model", str(model), "--threads", "1", "--workers", "1", "--batch", "2"]

    def start(self, out, *arguments, before="", **environment):
        """Start a process with these environment variables that first runs the Python code `before`."""
        process = subprocess.Popen(
            [sys.executable, "-c", before + MAIN, "infer", *self.fixed, "--out", out, *arguments],
            cwd=self.cwd,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def __call__(self, out, *arguments):
        process = self.start(out, *arguments)
        stdout, stderr = process.communicate(timeout=120)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def count(self, out="out"):
        """Return the number of lines of results.jsonl."""
        path = self.cwd / out / "results.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for(self, out, count, process):
        """Wait until there are so many records, or the process has ended."""
        wait_until(lambda: self.count(out) >= count or process.poll() is not None, seconds=0.002)

    def files(self, out):
        """Return the files of a run, without those that name times and commands."""
        left_out = ("run.json", "summary.json", "report.html", ".lock")
        root = self.cwd / out
        paths = [path for path in root.rglob("*") if path.is_file() and path.name not in left_out]
        return {str(path.relative_to(root)): path.read_bytes() for path in paths}

    def summary(self, out):
        return json.loads((self.cwd / out / "summary.json").read_text())

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
