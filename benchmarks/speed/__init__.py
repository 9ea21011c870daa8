"""The parts of benchmarks/numbers.py."""
