"""The step model: it learns what steps cost, and whatever it is shown it predicts nothing absurd."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lumenbox.core.cost import FLOOR_S, Shape, StepModel

SHAPES = st.builds(Shape, st.integers(0, 64), st.integers(0, 2048), st.integers(0, 200_000))
STEPS = st.lists(st.tuples(SHAPES, st.floats(-0.01, 30.0)), max_size=80)


def true_seconds(shape: Shape) -> float:
    return 0.004 + 0.0005 * shape.decodes + 0.0002 * shape.prefill_tokens + 0.001 * shape.context_tokens / 1024


def taught(shapes: list[Shape], noise: float = 0.0, seed: int = 1) -> StepModel:
    chance, model = random.Random(seed), StepModel()
    for shape in shapes:
        model.observe(shape, true_seconds(shape) * (1 + chance.uniform(-noise, noise)))
    return model


def mixed(count: int, seed: int = 1) -> list[Shape]:
    chance = random.Random(seed)
    return [
        Shape(decodes := chance.randrange(0, 33), chance.choice((0, 0, 128, 512)), decodes * chance.randrange(50, 800))
        for _ in range(count)
    ]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_it_learns_mixed_steps(noise: float, seed: int) -> None:
    model = taught(mixed(1500, seed), noise, seed)
    for shape in mixed(50, seed + 100):
        assert model.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.25 + noise, abs=0.004)


def test_it_follows_a_change_of_speed() -> None:
    model = taught(mixed(400))
    shape = Shape(8, 0, 2000)
    for _ in range(100):
        model.observe(shape, 5 * true_seconds(shape))
    assert model.seconds(shape) == pytest.approx(5 * true_seconds(shape), rel=0.1)


def test_hours_of_equal_steps_unlearn_nothing_absurdly() -> None:
    """No direction that is not excited may run away: the next other step still gets a sane prediction."""
    model = taught([*mixed(400), *[Shape(8, 0, 4096)] * 20_000], noise=0.2)
    assert model.seconds(Shape(8, 0, 4096)) == pytest.approx(true_seconds(Shape(8, 0, 4096)), rel=0.3)
    other = Shape(1, 512, 100)
    assert 0.1 * true_seconds(other) < model.seconds(other) < 10 * true_seconds(other)


def test_a_single_hiccup_is_no_law() -> None:
    model = taught(mixed(400))
    shape = Shape(8, 0, 2000)
    before = model.seconds(shape)
    model.observe(shape, 60.0)
    assert model.seconds(shape) < 2 * before


@settings(max_examples=200)
@given(STEPS, SHAPES)
@example([(Shape(1, 0, 0), -0.01)] * 3, Shape(0, 0, 0))
def test_predictions_are_positive_and_finite_whatever_was_seen(steps: list[tuple[Shape, float]], shape: Shape) -> None:
    model = StepModel()
    for seen, seconds in steps:
        model.observe(seen, seconds)
    assert FLOOR_S <= model.seconds(shape) < 1e6


@settings(max_examples=200)
@given(STEPS, SHAPES, st.integers(1, 50))
def test_a_larger_step_is_never_predicted_to_be_shorter(
    steps: list[tuple[Shape, float]], shape: Shape, more: int
) -> None:
    model = StepModel()
    for seen, seconds in steps:
        model.observe(seen, seconds)
    for larger in (
        Shape(shape.decodes + more, shape.prefill_tokens, shape.context_tokens),
        Shape(shape.decodes, shape.prefill_tokens + more, shape.context_tokens),
        Shape(shape.decodes, shape.prefill_tokens, shape.context_tokens + more),
    ):
        assert model.seconds(larger) >= model.seconds(shape)


@settings(max_examples=100)
@given(STEPS, st.integers(0, 64), st.integers(0, 100_000))
def test_the_prefill_that_is_said_to_fit_does(
    steps: list[tuple[Shape, float]], decodes: int, context_tokens: int
) -> None:
    model = StepModel()
    for seen, seconds in steps:
        model.observe(seen, seconds)
    fitting = model.prefill_within(0.2, decodes, context_tokens)
    if fitting > 0:
        assert model.seconds(Shape(decodes, fitting, context_tokens)) <= 0.2 + 2 * FLOOR_S


def test_it_knows_only_sizes_near_those_it_has_seen() -> None:
    model = taught([Shape(4, 100, 0)] * 7)
    assert not model.knows(Shape(4, 100, 0))
    model.observe(Shape(4, 100, 0), 0.1)
    assert model.knows(Shape(8, 200, 0))
    assert not model.knows(Shape(9, 0, 0))
    assert not model.knows(Shape(0, 201, 0))
