"""Which listed initial states are for what. The lists are disjoint by construction, for every task.

A listed initial state is the seed that `MetaWorldEnv.reset` takes; LeRobot's Meta-World environment reaches the
same state from the same seed.
"""

from __future__ import annotations

TRAIN = range(0, 100_000)
HELD_OUT = range(1_000_000, 1_100_000)
DEMONSTRATION = range(2_000_000, 2_100_000)

SPLITS = {"train": TRAIN, "held_out": HELD_OUT, "demonstration": DEMONSTRATION}
