"""Writing that never leaves half a file under its final name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from opal_deploy.artifact.files import sha256_of_file, written_atomically
from opal_deploy.errors import UsageError


def test_a_digest_is_of_all_bytes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(os.urandom(3 * (1 << 20) + 7))
    assert sha256_of_file(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_name_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "a" / "f.bin"
    with written_atomically(path) as temporary:
        temporary.write_bytes(b"new")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename across file systems would copy"
        assert temporary.suffix == path.suffix
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["f.bin"]


def _fail_halfway(path: Path, error: BaseException) -> None:
    with written_atomically(path) as temporary:
        temporary.write_bytes(b"half")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "f.bin"
    path.write_bytes(b"old")
    with pytest.raises(error):
        _fail_halfway(path, error())
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f.bin"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No space left") as refusal:
        _fail_halfway(tmp_path / "f", OSError(28, "No space left on device"))
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_as_readable_as_any_other(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_bytes(b"")
    with written_atomically(tmp_path / "f"):
        pass
    assert (tmp_path / "f").stat().st_mode == usual.stat().st_mode
