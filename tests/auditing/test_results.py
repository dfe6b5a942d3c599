"""The images that records were made of, found again without memory for all of them."""

import errno
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest

from opal_deploy.auditing.images import RecordSources
from opal_deploy.errors import UsageError
from opal_deploy.records.build import error_record
from opal_deploy.sources.image import InputImage

MEGABYTE = 1 << 20


def members(count):
    """Yield members as a compressed tar gives them, a megabyte each."""
    for number in range(count):
        content = bytes([number]) * MEGABYTE
        yield InputImage.at(Path(f"a.tgz/{number}.jpg"), f"{number}.jpg", source=content, index=number)


def test_members_of_a_compressed_tar_are_found_and_wait_on_the_disk():
    tracemalloc.start()
    try:
        sources = RecordSources(members(20))
        assert tracemalloc.get_traced_memory()[1] < 4 * MEGABYTE
    finally:
        tracemalloc.stop()
    for number in (19, 0, 7):
        item = sources.find(error_record(f"a.tgz/{number}.jpg", "not_found", "", index=number))
        assert item.source == bytes([number]) * MEGABYTE


def test_a_full_disk_is_told_in_a_line(monkeypatch):
    def fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    with pytest.raises(UsageError, match=r"No space left on device.*TMPDIR to a folder with room, or unpack"):
        RecordSources(members(1))
