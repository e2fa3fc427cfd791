"""What a step costs: a linear model of its shape, fitted while the box runs.

Fitted by proportionate normalised least mean squares, the coefficients kept from going negative. Recursive least
squares, tried first, diverged under that constraint, and without it learned negative rates from steps that look alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

SCALES = (1.0, 8.0, 256.0, 4096.0)
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


class StepModel(msgspec.Struct):
    """seconds = a + b * decodes / 8 + c * prefill_tokens / 256 + d * context_tokens / 4096, none of them negative.

    `seconds` predicts; `observe` learns (proportionate normalised LMS, Duttweiler 2000; projected onto >= 0).
    `largest_*` bound the region in which a prediction is worth anything.
    """

    coefficients: list[float] = msgspec.field(default_factory=lambda: [0.02, 0.016, 0.256, 0.002])
    observed: int = 0
    largest_decodes: int = 0
    largest_prefill: int = 0

    def seconds(self, shape: Shape) -> float:
        """Predicted duration of a step."""
        return max(FLOOR_S, _dot(self.coefficients, _features(shape)))

    def knows(self, shape: Shape) -> bool:
        """Whether steps of about this size have been seen."""
        return (
            self.observed >= FIRST_OBSERVATIONS
            and shape.decodes <= 2 * self.largest_decodes
            and shape.prefill_tokens <= 2 * self.largest_prefill
        )

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a finished step."""
        x = _features(shape)
        seconds = max(FLOOR_S, seconds)  # less the time spent waiting for a core, a short step may come out negative
        if self.observed >= FIRST_OBSERVATIONS:
            seconds = min(seconds, SURPRISE * self.seconds(shape))
        weights = [c + SHARE_OF_SMALL * max(self.coefficients) for c in self.coefficients]
        power = sum(w * v * v for w, v in zip(weights, x, strict=True))
        step = RATE * (seconds - _dot(self.coefficients, x)) / power
        moves = [step * w * v for w, v in zip(weights, x, strict=True)]
        self.coefficients = [max(0.0, c + move) for c, move in zip(self.coefficients, moves, strict=True)]
        self.observed += 1
        self.largest_decodes = max(self.largest_decodes, shape.decodes)
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)

    def prefill_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Prefill tokens that fit beside the decodes into a step of `seconds`."""
        left = seconds - self.seconds(Shape(decodes, 0, context_tokens))
        return int(left * SCALES[2] / max(self.coefficients[2], 1e-5))


def _features(shape: Shape) -> tuple[float, ...]:
    return (1.0, shape.decodes / SCALES[1], shape.prefill_tokens / SCALES[2], shape.context_tokens / SCALES[3])


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
