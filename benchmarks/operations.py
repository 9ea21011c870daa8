"""lowp beside its peers, in one process: how fast numbers are rounded, encoded and decoded, as a ratio to `copy_`.

    python -m benchmarks operations                  every float of up to 8 bits, the other families and the peers, on the CPU
    python -m benchmarks operations --device cuda    the same on a GPU, and a conv net with a quantizer on every activation
    python -m benchmarks operations --quick          a few formats, a minute

Every measured call has a size that no call had before. README.md beside this says how to read the results.
"""

from benchmarks.speed.run import main

if __name__ == "__main__":
    main()
