"""What a step costs: a linear model of its shape, fitted while the box runs by recursive least squares."""

from __future__ import annotations

import msgspec

FEATURES = 4
FORGETTING = 0.98
"""Weight that an observation keeps per later one: about fifty steps of memory."""
FLOOR_S = 1e-4


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """What a step is made of, as its worker declares it before it starts."""

    decodes: int
    prefill_tokens: int
    context_tokens: int


class StepModel(msgspec.Struct):
    """seconds = a + b * decodes + c * prefill_tokens + d * context_tokens / 1024.

    `seconds` predicts; `observe` learns (recursive least squares with forgetting, Haykin, Adaptive Filter Theory §9).
    `largest_*` bound the region in which a prediction is worth anything.
    """

    coefficients: list[float] = msgspec.field(default_factory=lambda: [0.02, 0.002, 0.001, 0.0005])
    covariance: list[list[float]] = msgspec.field(
        default_factory=lambda: [[1e2 if i == j else 0.0 for j in range(FEATURES)] for i in range(FEATURES)]
    )
    observed: int = 0
    largest_decodes: int = 0
    largest_prefill: int = 0

    def seconds(self, shape: Shape) -> float:
        """Predicted duration of a step."""
        return max(FLOOR_S, sum(c * x for c, x in zip(self.coefficients, _features(shape), strict=True)))

    def knows(self, shape: Shape) -> bool:
        """Whether steps of about this size have been seen."""
        return (
            self.observed >= 8
            and shape.decodes <= 2 * self.largest_decodes
            and shape.prefill_tokens <= 2 * self.largest_prefill
        )

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a finished step."""
        x = _features(shape)
        px = [sum(p * v for p, v in zip(row, x, strict=True)) for row in self.covariance]
        gain = [v / (FORGETTING + sum(a * b for a, b in zip(x, px, strict=True))) for v in px]
        error = seconds - sum(c * v for c, v in zip(self.coefficients, x, strict=True))
        self.coefficients = [c + g * error for c, g in zip(self.coefficients, gain, strict=True)]
        self.covariance = [
            [min(1e4, (p - g * w) / FORGETTING) for p, w in zip(row, px, strict=True)]
            for row, g in zip(self.covariance, gain, strict=True)
        ]
        self.observed += 1
        self.largest_decodes = max(self.largest_decodes, shape.decodes)
        self.largest_prefill = max(self.largest_prefill, shape.prefill_tokens)

    def prefill_within(self, seconds: float, decodes: int, context_tokens: int) -> int:
        """Prefill tokens that fit beside the decodes into a step of `seconds`."""
        left = seconds - self.seconds(Shape(decodes, 0, context_tokens))
        return int(left / max(self.coefficients[2], 1e-7))


def _features(shape: Shape) -> tuple[float, float, float, float]:
    return (1.0, float(shape.decodes), float(shape.prefill_tokens), shape.context_tokens / 1024)
