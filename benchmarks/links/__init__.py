"""The parts of `python -m benchmarks links` and of benchmarks/wire_cuda.py: ranks on links of a known speed, or on one GPU."""
