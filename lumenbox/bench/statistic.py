"""The one interval that the experiments report."""

from __future__ import annotations

import statistics

STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Two-sided 95 % quantiles for 1 to 9 degrees of freedom."""


def interval_95(values: list[float]) -> tuple[float, float]:
    """Mean of at least 2 values and half the width of its 95 % interval (Student)."""
    half = student_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half


def student_95(degrees: int) -> float:
    """The quantile: tabled where few, else by the Cornish-Fisher expansion about the normal one."""
    if degrees <= len(STUDENT_95):
        return STUDENT_95[degrees - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
