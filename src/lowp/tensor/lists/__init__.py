"""One elementwise function over many tensors in one launch: traced once, printed as C++ or as Triton."""
