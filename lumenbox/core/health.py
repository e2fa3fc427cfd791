"""When a step is overdue, and when a worker is slower than its peers. The shell measures, this judges."""

from __future__ import annotations

from statistics import median

from lumenbox.core.cost import Shape, StepModel

HANG_FACTOR = 3.0
HANG_GRACE_S = 0.2
UNKNOWN_DEADLINE_S = 60.0
"""For a step larger than any seen: a first long prefill is no hang."""
GRAY_FACTOR = 4.0
GRAY_STEPS = 40
"""Steps in a row, counted down by healthy ones, that a worker must be that much slower than its peers."""


def deadline_s(model: StepModel, shape: Shape) -> float:
    """How long a step of this shape may take before it counts as a hang, in its own CPU-less time."""
    if not model.knows(shape):
        return UNKNOWN_DEADLINE_S
    return HANG_FACTOR * model.seconds(shape) + HANG_GRACE_S


def is_gray(seconds: float, shape: Shape, peers: list[StepModel]) -> bool:
    """Whether one step took far longer than the peers' models allow for its shape."""
    known = [peer.seconds(shape) for peer in peers if peer.knows(shape)]
    return bool(known) and seconds > GRAY_FACTOR * median(known) + 0.005
