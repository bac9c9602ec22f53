"""Lists of initial states: disjoint, so that held-out means never trained on."""

import itertools

from wmrl_embodied.envs.splits import DEMONSTRATION, HELD_OUT, SPLITS, TRAIN


def test_lists_are_disjoint_and_long():
    for one, other in itertools.combinations(SPLITS.values(), 2):
        assert not range(max(one.start, other.start), min(one.stop, other.stop))
    assert {len(split) for split in SPLITS.values()} == {100_000}


def test_every_list_has_its_name():
    assert SPLITS == {"train": TRAIN, "held_out": HELD_OUT, "demonstration": DEMONSTRATION}
