"""How long predictions take, and how far predicted steps are from measured ones.

    python -m benchmarks predict                            how long predictions take; ten seconds
    python -m benchmarks predict --links                    2 and 4 ranks on links of 100 Mbit/s to 10 Gbit/s; 15 minutes
    python -m benchmarks predict --links --rates 1gbit --ranks 2    one of these; its rows replace those in the file
    python -m benchmarks predict --nccl 2                   NCCL ranks that share one GPU; 4 minutes

`--links` needs root, `ip` and `tc`, and a computer that does nothing else. Each link is made, `lowp calibrate` runs through it,
then steps of three models are measured, wire by wire, in turns. What is compared: the median of the measured steps, and the
step that is predicted from the calibration alone; and what `lowp plan` chooses, against the fastest that was measured.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.harness import RESULTS

RATES = ("100mbit", "200mbit", "1gbit", "10gbit")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one reduction; of links and GPUs, one model: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--links", action="store_true", help="predicted against measured steps on shaped links")
    parser.add_argument("--nccl", type=int, metavar="RANKS", help="the same for NCCL ranks that share one GPU")
    parser.add_argument("--mps", action="store_true", help="with --nccl: under NVIDIA's Multi-Process Service")
    parser.add_argument("--rates", nargs="+", default=RATES, help="of --links")
    parser.add_argument("--ranks", nargs="+", type=int, default=(2, 4), help="of --links")
    parser.add_argument("--models", nargs="+", help="default: all three")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a calibration")
    parser.add_argument("--timeout", type=float, default=460.0, help="seconds of one link; models that are done by then count")
    parser.add_argument("--again", type=Path, metavar="FILE", help="predict the steps in a file of results anew")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.links or options.nccl or options.again:
        from benchmarks.predict.reality import again, on_links, on_one_gpu

        sys.exit(again(options) if options.again else on_one_gpu(options) if options.nccl else on_links(options))
    from benchmarks.predict import speed

    if options.measure:
        speed.measure(options.measure)
        return
    speed.main(options.out, options.quick)


if __name__ == "__main__":
    main()
