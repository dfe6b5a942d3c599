"""Images over a network are read ahead of their decoding, a bounded number of them."""

import io
import threading

import pytest

from opal_deploy.errors import ImageError
from opal_deploy.predict.prepare import ReadAhead
from opal_deploy.preprocess.decode import FileSource
from opal_deploy.storage.files import FileFingerprint, RemoteFile


def test_the_next_images_are_read_at_a_time_within_bounds(monkeypatch):
    under_way = threading.Semaphore(0)
    opened = []

    def open_file(file):
        opened.append(file.name)
        under_way.release()
        if file.name == "1":
            raise ImageError("not_found", "no such object")
        return io.BytesIO(file.name.encode())

    monkeypatch.setattr(RemoteFile, "open", open_file)
    sizes = [10, 10, 100 << 20, 60 << 20, 60 << 20, 5]
    sources = [RemoteFile(f"s3://b/{n}", f"s3://b/{n}", FileFingerprint(size, 0)) for n, size in enumerate(sizes)]
    reading = ReadAhead().read([*sources, b"in memory"])
    first = next(reading)
    for _ in range(2):
        under_way.acquire()
    # the third alone is larger than all that may be held
    assert sorted(opened) == ["0", "1"]
    assert isinstance(first, FileSource)
    assert first.open().read() == first.open().read() == b"0"
    second = next(reading)
    with pytest.raises(ImageError, match="no such object"):
        second.open()
    others = [source if isinstance(source, bytes) else source.open().read() for source in reading]
    assert others == [b"2", b"3", b"4", b"5", b"in memory"]
    assert sorted(opened) == ["0", "0", "1", "2", "3", "4", "5"]
