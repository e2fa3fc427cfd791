"""The one interval that the experiments report."""

from __future__ import annotations

import statistics

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Two-sided 95 % quantiles for 1 to 9 degrees of freedom."""


def interval_95(values: list[float]) -> tuple[float, float]:
    """Mean of 2 to 10 values and half the width of its 95 % interval (Student)."""
    half = STUDENT_95[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half
