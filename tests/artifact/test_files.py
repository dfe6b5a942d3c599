"""Writing that never leaves half a file under its final name."""

import errno
import hashlib
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest

from opal_deploy.artifact.files import (
    atomic_write,
    check_output,
    compute_sha256,
    lock_directory,
    remove_temporary_files,
)
from opal_deploy.errors import UsageError


def test_a_digest_is_of_all_bytes(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(os.urandom(3 * (1 << 20) + 7))
    assert compute_sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_name_appears_when_the_block_ends(tmp_path):
    path, usual = tmp_path / "a" / "f.bin", tmp_path / "usual"
    usual.touch()
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists()
        # a rename across file systems would copy
        assert (temporary.parent, temporary.suffix) == (path.parent, path.suffix)
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode == usual.stat().st_mode


def _fail_halfway(path, error):
    with atomic_write(path) as temporary:
        temporary.write_bytes(b"half")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left")])
def test_a_failure_leaves_what_was_there_and_a_full_disk_is_one_line(tmp_path, error):
    path = tmp_path / "f.bin"
    path.write_bytes(b"old")
    expected = UsageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match=rf"\A.*{error.strerror}.*\Z" if isinstance(error, OSError) else None):
        _fail_halfway(path, error)
    with pytest.raises(expected):
        _fail_halfway(tmp_path / "new" / "deep" / "f.bin", error)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.bin"]


def test_a_folder_is_locked_while_a_process_works_there_and_free_once_it_is_killed(tmp_path):
    folder = tmp_path / "new" / "folder"
    hold = (
        "import sys, time; from pathlib import Path; from opal_deploy.artifact.files import lock_directory\n"
        "with lock_directory(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", hold, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="another process is working there"), lock_directory(folder):
            pass
        holder.kill()
    with lock_directory(folder):
        assert (folder / ".lock").exists()
    assert not (folder / ".lock").exists()
    # one that was made for nothing is taken back
    with lock_directory(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()


def test_a_file_system_without_locks_is_worked_on_all_the_same(tmp_path, monkeypatch):
    def no_locks(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with lock_directory(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_name_that_was_taken_in_the_meantime_is_not_replaced(tmp_path):
    path = tmp_path / "f.bin"
    with pytest.raises(UsageError, match="in the meantime"), atomic_write(path, replace=False) as late:  # noqa: PT012
        late.write_bytes(b"late")
        path.write_bytes(b"early")
    assert path.read_bytes() == b"early"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_a_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe.html"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match=r"pipe\.html"), atomic_write(pipe):
        pass
    assert pipe.is_fifo()


def test_only_what_killed_writers_of_this_file_left_is_removed(tmp_path):
    for name in (".best.pt.x1.part.pt", ".best.pt.part", ".other.pt.x1.part.pt", "best.pt"):
        (tmp_path / name).touch()
    with atomic_write(tmp_path / "best.pt") as temporary:
        temporary.write_bytes(b"new")
        remove_temporary_files(tmp_path / "best.pt")
    assert (tmp_path / "best.pt").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".best.pt.part", ".other.pt.x1.part.pt", "best.pt"]


@pytest.mark.parametrize(
    ("name", "overwrite", "complaint"),
    [
        ("new.html", False, None), ("x" * 300 + ".html", True, "too long"), ("folder.html", True, "folder"),
        ("/dev/full", True, "device"), ("linked.html", True, "reads that file"), ("model.onnx", True, "not a .html"),
        ("page.html", False, "--overwrite"), ("page.html", True, None),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_what_a_command_may_write(tmp_path, name, overwrite, complaint):
    for file in ("input.html", "model.onnx", "page.html"):
        (tmp_path / file).touch()
    (tmp_path / "folder.html").mkdir()
    os.link(tmp_path / "input.html", tmp_path / "linked.html")
    inputs = [None, "s3://bucket/results.jsonl", tmp_path / "missing", tmp_path / "input.html"]
    refused = nullcontext() if complaint is None else pytest.raises(UsageError, match=rf"\A--html .*{complaint}.*\Z")
    with refused:
        check_output("--html", tmp_path / name, [".html"], inputs=inputs, overwrite=overwrite)
