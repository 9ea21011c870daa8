"""Where the files of a set are: on this machine, or else on the network.

The data directory is the one given, else $LOWP_DATA, else ~/.cache/lowp/data. A set's files lie in its folder that has the
set's name, or in the directory itself. What is missing is downloaded into that folder.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from lowp.training.data.download import Download, DownloadFailed, download
from lowp.training.regular_file import user_path

CACHE = "~/.cache/lowp/data"


@dataclass(frozen=True)
class Files:
    """The files of a set: what they are called and where they come from."""

    set_name: str
    names: tuple[tuple[str, ...], ...]  # each file may lie there under any of its names; the first is for error messages
    downloads: tuple[Download, ...]
    folders: tuple[str, ...] = ()  # where else to look in a data directory: as other programs lay the set out

    def present_in(self, folder: Path) -> list[Path] | None:
        """The files in the order of `names`, if all are there. What is there and no file is refused when it is opened."""
        found = [next((folder / name for name in spellings if (folder / name).exists()), None) for spellings in self.names]
        return None if None in found else [path for path in found if path is not None]


def data_directory(given: Path | None) -> Path:
    if given is not None:
        directory, said = user_path(str(given)), "--data"
    elif os.environ.get("LOWP_DATA"):
        directory, said = user_path(os.environ["LOWP_DATA"]), "$LOWP_DATA"
    else:
        return Path(CACHE).expanduser()
    if not directory.is_dir():  # likely a slip of the pen: nothing is downloaded into a directory made by mistake
        raise ValueError(f"{said} {directory} is not a directory")
    return directory


def locate(files: Files, given: Path | None) -> list[Path]:
    """The files in the order of `files.names`, downloaded if need be."""
    directory = data_directory(given)
    own = directory / files.set_name
    # The set's own folder comes first: MNIST and Fashion-MNIST call their files alike.
    for folder in (own, *(directory / other for other in files.folders), directory):
        found = files.present_in(folder)
        if found is not None:
            return found
    try:
        for archive in files.downloads:
            if not all((own / name).is_file() for name in archive.gives):
                download(archive, own)
    except DownloadFailed as failed:
        wanted = ", ".join(spellings[0] for spellings in files.names)
        raise ValueError(
            f"data set {files.set_name!r} is not in {own} or {directory}, and {failed}; "
            f"put its files ({wanted}) there, or say where they are with --data"
        ) from None
    found = files.present_in(own)
    assert found is not None, "the downloads give all the files"
    return found
