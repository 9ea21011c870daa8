"""The wires that `lowp plan` chooses from, and that `lowp calibrate` measures, unless it is told others.

Sixteen, eight, six, four and fewer bits, each with the scales that do well there (docs/WIRE.md has their errors). What only
works with error feedback (top-k) is not among them: the error of one step says nothing about it.
"""

CODECS = (
    "fp16/none",
    "bf16/none",
    "e4m3fn/local",
    "e5m2/local",
    "e5m2/aps",
    "int8/block:256",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "nvfp4",
    "e2m1fn/block:32",
    "adaptive:4.4",
    "adaptive:3",
    "adaptive:2.4",
)
BUCKET_MB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
