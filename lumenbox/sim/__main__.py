"""Run seeds: python -m lumenbox.sim FIRST [COUNT]."""

from __future__ import annotations

import sys
from collections import Counter

from lumenbox.sim.world import SimulationFailed, run


def main(first: int, count: int = 1) -> int:
    """Run `count` seeds from `first` on; 1 if one of them fails, with its story."""
    totals: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            totals += run(seed)
        except SimulationFailed as failure:
            print(failure)
            return 1
    print(f"{count} seeds from {first}: {dict(sorted(totals.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
