"""What `lowp calibrate` measures: links, codecs, models, and what they take from each other. All ranks measure together."""
