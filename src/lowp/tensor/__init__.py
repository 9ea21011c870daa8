"""Numbers in tensors: quantize, encode, decode, pack, noise. One source in torch operations on bits, for every chip."""
