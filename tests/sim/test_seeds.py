"""Histories from seeds: random boxes, loads and faults. A failure prints its last events and the line to repeat it."""

import pytest

from lumenbox.sim.world import run

SEEDS = 2000
AT_ONCE = 100


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_seeds(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        run(seed)
