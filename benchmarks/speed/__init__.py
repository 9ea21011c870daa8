"""The parts of benchmarks/operations.py."""
