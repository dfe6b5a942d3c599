"""Archives for tests."""

import io
import tarfile
import zipfile

KINDS = {
    "plain.tar": "w",
    "packed.tgz": "w:gz",
    "packed.tar.bz2": "w:bz2",
    "packed.tar.xz": "w:xz",
    "deflated.zip": zipfile.ZIP_DEFLATED,
}


def add_member(tar, name, data, kind=tarfile.REGTYPE, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, target, len(data)
    tar.addfile(info, io.BytesIO(data))


def pack(path, content, kind=""):
    """Write an archive of the kind that its name says, or of another one."""
    mode = KINDS[kind or path.name]
    if isinstance(mode, str):
        with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:
            for name, data in content.items():
                add_member(tar, name, data)
    else:
        with zipfile.ZipFile(path, "w", mode) as archive:
            for name, data in content.items():
                archive.writestr(name, data)
    return path
