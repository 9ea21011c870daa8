"""Tensors between ranks: codecs, scaling, reductions, hooks, real and virtual worlds."""
