"""Random files in the layout of CIFAR-10 and Fashion-MNIST, where there is no network: python data.py FOLDER"""

import struct
import sys
from pathlib import Path

import numpy as np

folder = Path(sys.argv[1])
random = np.random.default_rng(0)
cifar, fashion = folder / "cifar-10-batches-bin", folder / "FashionMNIST/raw"
for each in (cifar, fashion):
    each.mkdir(parents=True, exist_ok=True)
for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
    records = random.integers(0, 256, (10_000, 3073), dtype=np.uint8)
    records[:, 0] %= 10
    (cifar / name).write_bytes(records.tobytes())
for name, count in (("train", 60_000), ("t10k", 10_000)):
    images, labels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8), random.integers(0, 10, count, dtype=np.uint8)
    (fashion / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4I", 0x803, count, 28, 28) + images.tobytes())
    (fashion / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, count) + labels.tobytes())
