"""The parts of `python -m benchmarks errors`: real gradients, errors of their mean by codec, tables and the figure."""
