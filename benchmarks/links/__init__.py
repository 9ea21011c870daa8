"""The parts of benchmarks/wire.py."""
