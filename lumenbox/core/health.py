"""When a step is overdue, and when a worker is slower than its peers. The shell measures, this judges."""

from __future__ import annotations

from statistics import median

from lumenbox.core.cost import Shape, StepModel

HANG_FACTOR = 3.0
HANG_GRACE_S = 0.1
CONFIRM_S = 0.1
"""Beyond its deadline a worker is watched for so long before it counts as hung, and only time counts in which no
thread of it runs or waits for a core: a step may wait for a helper thread that a busy machine does not let run."""
SPIN_S = 5.0
"""One that is that far beyond its deadline counts as hung although it runs."""
UNKNOWN_DEADLINE_S = 60.0
"""For a step larger than any seen: a first long prefill is no hang."""
GRAY_FACTOR = 4.0
GRAY_STEPS = 40
"""Steps, counted down by healthy ones, in which a worker must be that much slower than its peers."""
PACE_WEIGHT = 0.1
PACE_BOUNDS = (0.25, 100.0)


def deadline_s(model: StepModel, pace: float, shape: Shape) -> float:
    """How long a step of this shape may take before it counts as a hang, in its own CPU-less time."""
    if not model.knows(shape):
        return UNKNOWN_DEADLINE_S
    return HANG_FACTOR * model.seconds(shape) * max(1.0, pace) + HANG_GRACE_S


def next_pace(pace: float, seconds: float, predicted_s: float) -> float:
    """A worker's pace is how its steps compare with the box's model of them, smoothed; 1 is as predicted."""
    low, high = PACE_BOUNDS
    now = seconds / predicted_s
    return pace + PACE_WEIGHT * ((low if now < low else high if now > high else now) - pace)


def is_gray(pace: float, peers: list[float]) -> bool:
    """Whether a worker is far slower than its peers for the same work."""
    return bool(peers) and pace > GRAY_FACTOR * max(1.0, median(peers))
