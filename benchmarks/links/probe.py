"""A plain TCP transfer, to see that a shaped link has the rate it was given.

    python -m benchmarks.links.probe hear ADDRESS RESULT
    python -m benchmarks.links.probe send ADDRESS BYTES

Standard library alone, so that it starts at once. The rate is the median over tenths of the transfer: on a computer that others
use too, processes stand still for some milliseconds now and then, and that is not the link's doing.
"""

import socket
import statistics
import sys
import time
from pathlib import Path

PORT = 29400
PIECE = 1 << 20
PATIENCE = 20  # seconds for the other side to start
WINDOWS = 10


def hear(address: str, result: str) -> None:
    """Write the bytes a second that arrive, from the first to the last."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(PATIENCE)
        connection, _ = server.accept()
    connection.settimeout(PATIENCE)
    buffer = bytearray(PIECE)
    total, arrivals = 0, []
    while heard := connection.recv_into(buffer):
        total += heard
        arrivals.append((time.perf_counter(), total))
    Path(result).write_text(str(_median_rate(arrivals)))


def _median_rate(arrivals: list[tuple[float, int]]) -> float:
    """Windows end where something arrived: pieces of a known size cannot be cut in two by a window's edge."""
    length = (arrivals[-1][0] - arrivals[0][0]) / WINDOWS
    rates, (began, before) = [], arrivals[0]
    for moment, total in arrivals[1:]:
        if moment - began >= 0.99 * length:
            rates.append((total - before) / (moment - began))
            began, before = moment, total
    return statistics.median(rates)


def send(address: str, size: str) -> None:
    piece = bytes(PIECE)
    with _connect(address) as connection:
        for _ in range(max(1, int(size) // PIECE)):
            connection.sendall(piece)


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=PATIENCE)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


if __name__ == "__main__":
    {"hear": hear, "send": send}[sys.argv[1]](*sys.argv[2:])
