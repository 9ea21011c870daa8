"""lowp's collectives beside torch's on links of a known speed: two and four network namespaces, gloo, one rank in each.

    python benchmarks/wire.py                     every link, 2 and 4 ranks, 2^22 to 2^25 elements, a DDP step, 2 x 2 ranks
    python benchmarks/wire.py --quick             two links, 2 ranks, 2^22 elements: a few minutes
    python benchmarks/wire.py --rates 1gbit --ranks 2 --sizes 24 --only 'fp16|e5m2' --sections collective

Needs root, and `ip` and `tc` of iproute2. Nothing on the host's own interfaces is touched. An estimate of the time is printed
first. Results go to benchmarks/results/<machine>-wire.json (every round) and .md.
"""

import os
import sys

# As in numbers.py: the repository's root instead of this folder, where `numbers.py` would hide the standard library's
sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from benchmarks.links.run import main  # noqa: E402

if __name__ == "__main__":
    main()
