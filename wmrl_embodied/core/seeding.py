"""Random generators that are a pure function of (seed, step, purpose), so that nothing has to be saved.

Knows nothing of what the draws are for; a resumed run asks with the same key and gets the same draws.
"""

from __future__ import annotations

import hashlib
import json
import operator

import numpy as np
import torch


def _entropy(seed: int, step: int, purpose: str, more: tuple[int, ...]) -> int:
    # JSON keeps the fields apart: numpy's own SeedSequence reads [1] and [1, 0] as the same key.
    key = json.dumps([operator.index(seed), operator.index(step), purpose, *map(operator.index, more)])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")


def rng(seed: int, step: int, purpose: str, *more: int) -> np.random.Generator:
    """NumPy generator for one purpose at one step.

    Args:
        seed: seed of the run.
        step: training step.
        purpose: what the draws are for, such as "anchors"; different words give independent streams.
        *more: further integers of the key, such as a group's index or an attempt's number.

    Raises:
        TypeError: if a part of the key that should be an integer is not one.
    """
    return np.random.default_rng(_entropy(seed, step, purpose, more))


def generator(seed: int, step: int, purpose: str, *more: int) -> torch.Generator:
    """CPU torch generator for one purpose at one step; the arguments are those of `rng`."""
    # torch takes 64 bits; the top one is dropped because some devices read the seed as signed.
    return torch.Generator().manual_seed(_entropy(seed, step, purpose, more) & (2**63 - 1))
