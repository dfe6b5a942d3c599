"""The rule for every file that a command writes."""

import os

import pytest

from opal_deploy.artifact.output_file import check_output
from opal_deploy.errors import UsageError

READ, OTHER = "this call reads that file", "exists and is not a .html file"
CASES = {
    "nothing has the name": ("new.html", False, None),
    "a name that is too long": ("x" * 300 + ".html", True, "File name too long"),
    "a folder": ("folder.html", True, "a folder has that name"),
    "a pipe": ("pipe.html", True, "a pipe or a device"),
    "a device": ("/dev/full", True, "a pipe or a device"),
    "an input": ("input.html", True, READ),
    "an input by a hard link": ("linked.html", True, READ),
    "a file of another kind": ("model.onnx", True, OTHER),
    "a file of its kind": ("page.html", False, "the file exists; choose another name, or pass --overwrite"),
    "a file of its kind, to be replaced": ("page.html", True, None),
}


@pytest.mark.parametrize(("name", "overwrite", "complaint"), CASES.values(), ids=CASES)
def test_what_a_command_may_write(tmp_path, name, overwrite, complaint):
    for file in ("input.html", "model.onnx", "page.html"):
        (tmp_path / file).touch()
    (tmp_path / "folder.html").mkdir()
    os.mkfifo(tmp_path / "pipe.html")
    os.link(tmp_path / "input.html", tmp_path / "linked.html")
    inputs = [None, "s3://bucket/results.jsonl", tmp_path / "missing", tmp_path / "input.html"]

    def check():
        check_output("--html", tmp_path / name, [".html"], inputs=inputs, overwrite=overwrite)

    if complaint is None:
        check()
    else:
        with pytest.raises(UsageError, match=rf"\A--html .*{complaint}.*\Z"):
            check()
