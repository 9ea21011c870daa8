"""`python -m benchmarks predict`: how long predictions take, and how far they are from steps that were measured."""
