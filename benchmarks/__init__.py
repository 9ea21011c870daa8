"""Benchmarks, by name: `python -m benchmarks NAME [--quick] [--out DIR]`. README.md beside this says what each measures."""
