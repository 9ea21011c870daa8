"""Files from the network: checked against a known checksum, and there whole or not at all.

A download is written under a name of its own and renamed when its checksum is right. So a run that is killed leaves no half
of a file that could be taken for one, and ranks that start together do not disturb each other: each downloads, and renames over
the same bytes.
"""

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TIMEOUT = 30  # seconds without an answer
_PIECE = 1 << 20


class DownloadFailed(Exception):
    """Why, as the rest of a sentence."""


@dataclass(frozen=True)
class Download:
    """One file to fetch: kept as it is, or a tar archive of which some members are kept."""

    urls: tuple[str, ...]  # mirrors, in the order they are tried
    md5: str  # as the sets' authors publish it
    gives: tuple[str, ...]  # the files it leaves behind
    inside: str = ""  # of an archive: the folder the files are in


def download(what: Download, folder: Path) -> None:
    """Fetch, check, unpack, and only then let the files appear in `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if what.inside:
            with tempfile.TemporaryFile(dir=folder) as archive:
                _fetch(what, archive)
                _unpack(what, archive, folder)
        else:
            with _whole_or_absent(folder / what.gives[0]) as file:
                _fetch(what, file)
    except OSError as error:
        raise DownloadFailed(f"cannot be downloaded: {folder} cannot be written ({error.strerror or error})") from None


@contextmanager
def _whole_or_absent(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when the block ends well."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.chmod(file.name, 0o644)  # a temporary file is for its owner alone; data may be shared
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _fetch(what: Download, into: IO[bytes]) -> None:
    """From the first mirror that answers with the right bytes."""
    reasons = []
    for url in what.urls:
        into.seek(0)
        into.truncate()
        digest = hashlib.md5(usedforsecurity=False)
        try:
            for piece in _pieces(url):
                digest.update(piece)
                into.write(piece)
        except DownloadFailed as failed:
            reasons.append(str(failed))
            continue
        if digest.hexdigest() == what.md5:
            into.seek(0)
            return
        reasons.append(f"{url}: its checksum is {digest.hexdigest()}, not {what.md5}")
    raise DownloadFailed(f"could not be downloaded ({'; '.join(reasons)})")


def _pieces(url: str) -> Iterator[bytes]:
    """The network has errors of many classes; here they become one, so that none is mistaken for an error of the disk."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            while piece := answer.read(_PIECE):
                yield piece
    except (OSError, http.client.HTTPException) as error:
        raise DownloadFailed(f"{url}: {getattr(error, 'reason', None) or error}") from None


def _unpack(what: Download, archive: IO[bytes], folder: Path) -> None:
    """Only the members asked for, by name: an archive has no say in where files go."""
    with tarfile.open(fileobj=archive) as tar:
        for name in what.gives:
            member = tar.extractfile(f"{what.inside}/{name}")
            assert member is not None, "the checksum is right, so the archive is the one we know"
            with _whole_or_absent(folder / name) as file:
                shutil.copyfileobj(member, file, _PIECE)
