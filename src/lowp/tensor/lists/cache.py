"""Where compiled kernels are kept between processes."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """LOWP_CACHE, or a folder of the user's own among temporary files. What is in it is run: nobody else may write there."""
    folder = Path(os.environ.get("LOWP_CACHE") or Path(tempfile.gettempdir()) / f"lowp-kernels-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else; set LOWP_CACHE to a folder of your own")
    return folder
