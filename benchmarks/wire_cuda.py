"""Encoding and decoding a bucket of gradients on a GPU, beside what its memory allows: see links/cuda.py."""

import os
import sys

# As in numbers.py: the repository's root instead of this folder, where `numbers.py` would hide the standard library's
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from benchmarks.links.cuda import main  # noqa: E402

if __name__ == "__main__":
    main()
