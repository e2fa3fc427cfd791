"""What a step costs: a linear model of its shape, fitted while the box runs.

Fitted by proportionate normalised least mean squares, the coefficients kept from going negative. Recursive least
squares, tried first, diverged under that constraint, and without it learned negative rates from steps that look alike.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

SCALES = (1.0, DECODES := 8.0, PREFILL := 256.0, CONTEXT := 4096.0)
"""Decodes, prefill tokens and context tokens are measured in units that make all features about one."""
RATE = 0.3
"""Share of an error that one observation corrects."""
SHARE_OF_SMALL = 0.02
"""An error is laid on the coefficients in proportion to their size, and so much of the largest on each at least."""
FIRST_OBSERVATIONS = 8
SURPRISE = 3.0
"""An observation counts as this many times the prediction at most: a hiccup is no law, a real change comes soon."""
FLOOR_S = 1e-4


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """What a step is made of, as its worker declares it before it starts."""

    decodes: int
    prefill_tokens: int
    context_tokens: int


class Shaped(Protocol):
    """What has a shape's fields, as the event StepCommitted does."""

    @property
    def decodes(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...


class StepModel(msgspec.Struct):
    """seconds = a + b * decodes / 8 + c * prefill_tokens / 256 + d * context_tokens / 4096, none of them negative.

    `seconds` predicts; `observe` learns (proportionate normalised LMS, Duttweiler 2000; projected onto >= 0).
    `largest_*` bound the region in which a prediction is worth anything.
    """

    coefficients: list[float] = msgspec.field(default_factory=lambda: [0.02, 0.016, 0.256, 0.002])
    observed: int = 0
    largest_decodes: int = 0
    largest_prefill: int = 0

    @property
    def rates(self) -> tuple[float, float, float, float]:
        """Seconds per step, per decode, per prefill token, per token of context."""
        a, b, c, d = self.coefficients
        return a, b / DECODES, c / PREFILL, d / CONTEXT

    def seconds(self, shape: Shaped) -> float:
        """Predicted duration of a step."""
        a, b, c, d = self.coefficients
        seconds = (
            a
            + b * shape.decodes / DECODES
            + c * shape.prefill_tokens / PREFILL
            + d * shape.context_tokens / CONTEXT
        )  # fmt: skip
        return seconds if seconds > FLOOR_S else FLOOR_S

    def knows(self, shape: Shaped) -> bool:
        """Whether steps of about this size have been seen."""
        return (
            self.observed >= FIRST_OBSERVATIONS
            and shape.decodes <= 2 * self.largest_decodes
            and shape.prefill_tokens <= 2 * self.largest_prefill
        )

    def observe(self, shape: Shaped, seconds: float) -> float | None:
        """Learn from a finished step; returns what it was predicted to take, None if nothing like it was known.

        Written out, without calls: it is most of what a step costs the core.
        """
        decodes, prefill = shape.decodes, shape.prefill_tokens
        x, y, z = decodes / DECODES, prefill / PREFILL, shape.context_tokens / CONTEXT
        a, b, c, d = self.coefficients
        fitted = a + b * x + c * y + d * z
        predicted = fitted if fitted > FLOOR_S else FLOOR_S
        error = (seconds if seconds > FLOOR_S else FLOOR_S) - fitted  # without the wait for a core it may be negative
        known = self.observed >= FIRST_OBSERVATIONS
        if known and error > (SURPRISE - 1) * predicted:
            error = (SURPRISE - 1) * predicted
        largest = a if a > b else b
        small = SHARE_OF_SMALL * (largest if largest > c and largest > d else c if c > d else d)
        of_a, of_b, of_c, of_d = a + small, (b + small) * x, (c + small) * y, (d + small) * z
        step = RATE * error / (of_a + of_b * x + of_c * y + of_d * z)
        a, b, c, d = a + step * of_a, b + step * of_b, c + step * of_c, d + step * of_d
        self.coefficients = [a if a > 0 else 0.0, b if b > 0 else 0.0, c if c > 0 else 0.0, d if d > 0 else 0.0]
        self.observed += 1
        if decodes > self.largest_decodes or prefill > self.largest_prefill:
            known = known and decodes <= 2 * self.largest_decodes and prefill <= 2 * self.largest_prefill
            self.largest_decodes = max(self.largest_decodes, decodes)
            self.largest_prefill = max(self.largest_prefill, prefill)
        return predicted if known else None

    def prefill_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Prefill tokens that fit beside the decodes into a step of `seconds`."""
        left = seconds - self.seconds(Shape(decodes, 0, context_tokens))
        return int(left * PREFILL / max(self.coefficients[2], 1e-5))
