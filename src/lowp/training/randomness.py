"""Randomness is an argument: a seed for every purpose, made of what it is for.

A run draws from no state that would have to be saved: the seed of a dropout mask is a function of (the run's seed, step, rank,
micro-batch), so a resumed run, and a virtual rank, draw what the uninterrupted and the real one do.
"""

import hashlib

import torch


def seed_of(*parts: int | str) -> int:
    """A seed (63 bits, as torch's generators take them) for what `parts` name: `seed_of(0, "shuffle", epoch)`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generators that layers draw from. (`torch.manual_seed` also leaves a note, with a stack trace, for every kind of
    device that is not there: 70 microseconds a call, and memory that grows.)"""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)


def has_drawn(seed: int, device: torch.device) -> bool:
    """Was anything drawn from the device's generator since `seed_torch(seed, device)`?"""
    on_cuda = device.type == "cuda"
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if on_cuda else torch.default_generator
    fresh = torch.Generator(generator.device).manual_seed(seed)
    return not torch.equal(generator.get_state(), fresh.get_state())
