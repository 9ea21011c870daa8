"""lowp beside its peers, in one process: how fast numbers are rounded, encoded and decoded, as a ratio to `copy_`.

    python benchmarks/numbers.py                  every float of up to 8 bits, the other families and the peers, on the CPU
    python benchmarks/numbers.py --device cuda    the same on a GPU, and a conv net with a quantizer on every activation
    python benchmarks/numbers.py --quick          a few formats, a minute

Every measured call has a size that no call had before. README.md beside this says how to read the results.
"""

import os
import sys

# A script's own folder comes first on the path, where this file would hide the standard library's `numbers`
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from benchmarks.speed.run import main  # noqa: E402

if __name__ == "__main__":
    main()
