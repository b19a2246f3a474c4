"""What a step costs: fitted, followed, never nonsense."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.backends.engine.cost_model import (
    UNSEEN,
    CostModel,
    StepCost,
    StepSample,
    StepShape,
    context_tokens,
    fit,
)

TRUE = StepCost(fixed_s=0.009, row_s=0.0008, further_row_s=0.0011, sequence_s=0.0002, context_s=1.5e-6)
SHAPES = [
    (1, 1, 20),
    (16, 1, 136),
    (8, 8, 150),
    (64, 8, 300),
    (192, 1, 18_528),
    (1, 1, 195),
    (192, 8, 2400),
    (8, 8, 400),
]
SERVED = [(8, 8, 900), (64, 64, 16_000), (32, 32, 4000), (300, 20, 60_000), (512, 1, 131_000)]


def seconds(shape: tuple[int, int, int], slower: float = 1.0) -> float:
    """What a step really takes."""
    return slower * TRUE.predict(*shape)


def test_a_fit_predicts_shapes_it_has_not_seen() -> None:
    """Eight steps are enough to predict ten times larger ones within a tenth."""
    cost = fit([StepSample(StepShape(*shape), seconds(shape)) for shape in SHAPES])
    for shape in SERVED:
        assert cost.predict(*shape) == pytest.approx(seconds(shape), rel=0.1)


def test_a_row_that_opens_a_tile_costs_more_than_the_next() -> None:
    """Where rows come in tiles, the fit finds what a tile costs, and every step since corrects it."""
    true = StepCost(fixed_s=0.009, row_s=0.0006, further_row_s=0.0006, tile_s=0.002, tile_rows=8)
    shapes = [StepShape(rows, rows, 100 * rows) for rows in (1, 8, 9, 16, 17, 64)]
    cost = fit(
        [
            StepSample(shape, true.predict(rows, rows, 100 * rows))
            for shape in shapes
            for rows in [shape.num_rows]
        ],
        StepCost.guess(8),
    )
    opens, fills = (cost.predict(rows + 1, 32, 0) - cost.predict(rows, 32, 0) for rows in (32, 33))
    assert opens == pytest.approx(0.0026, rel=0.15)
    assert fills == pytest.approx(0.0006, rel=0.15)
    model = CostModel(StepCost.guess(8))
    for number in range(600):
        rows = 1 + number % 48
        model.observe(rows, rows, 100 * rows, true.predict(rows, rows, 100 * rows))
    assert model.predict(33, 32, 0) - model.predict(32, 32, 0) == pytest.approx(0.0026, rel=0.15)


def jagged(rows: int) -> float:
    """Seconds of a step on a machine that is not linear: beyond 24 rows everything is a tenth dearer."""
    return (0.004 + 0.0008 * rows) * (1.1 if rows > 24 else 1.0)


def learnt() -> CostModel:
    """A model that has seen 16 to 32 sampled rows on that machine, many times each."""
    model = CostModel(fit([StepSample(StepShape(rows, rows, 0), jagged(rows)) for rows in (1, 8, 16)]))
    for number in range(2000):
        rows = 16 + number * 7 % 17
        model.observe(rows, rows, 0, jagged(rows))
    return model


def test_steps_that_were_seen_are_compared_as_they_were() -> None:
    """How much longer one step takes than another is known within 2 % where sampled rows were seen, though no
    linear model can say it.
    """
    model = learnt()
    ratio = jagged(32) / jagged(24)
    assert model.predict_corrected(32, 32, 0) / model.predict_corrected(24, 24, 0) == pytest.approx(
        ratio, rel=0.02
    )
    assert model.predict(32, 32, 0) / model.predict(24, 24, 0) < 0.96 * ratio


def test_a_slow_spell_is_not_put_down_to_the_rows_of_its_steps() -> None:
    """While the machine is a fifth slower, only steps of 24 rows are run: steps of 32 are not thought to be
    faster than those by more than 4 % afterwards.
    """
    model, ratio = learnt(), jagged(32) / jagged(24)
    for _ in range(60):
        model.observe(24, 24, 0, 1.2 * jagged(24))
    now = model.predict_corrected(32, 32, 0) / model.predict_corrected(24, 24, 0)
    assert now == pytest.approx(ratio, rel=0.04)


def test_only_steps_that_are_sampled_whole_are_corrected() -> None:
    """A step with a prompt's rows takes what the model says; sampled rows that were never seen are hoped to
    take a little less.
    """
    model = learnt()
    assert model.predict_corrected(32, 8, 0) == model.predict(32, 8, 0)
    assert model.predict_corrected(400, 400, 0) == pytest.approx((1 - UNSEEN) * model.predict(400, 400, 0))


def test_nothing_measured_is_the_default() -> None:
    """Without samples, or with steps that took no time, the default cost holds."""
    assert fit([]) == fit([StepSample(StepShape(1, 1, 1), 0.0)]) == StepCost()


@given(
    st.lists(
        st.tuples(st.integers(1, 512), st.integers(1, 64), st.integers(1, 200_000), st.floats(1e-4, 2.0)),
        max_size=30,
    )
)
def test_more_work_never_takes_less_time(steps: list[tuple[int, int, int, float]]) -> None:
    """Whatever is observed, no coefficient is below 0 and predictions stay finite and above 0."""
    model = CostModel()
    for rows, sequences, context, taken in steps:
        model.observe(rows, sequences, context, taken)
        assert min(model.cost.coefficients) >= 0
        assert 0 < model.predict(rows, sequences, context) < 1000


def test_observation_corrects_a_wrong_start() -> None:
    """A model that starts with somebody else's machine predicts this one's steps within 5 % after 400."""
    model, source = CostModel(), random.Random(1)
    for _ in range(400):
        shape = source.choice(SERVED)
        model.observe(*shape, seconds(shape))
    for shape in SERVED:
        assert model.predict(*shape) == pytest.approx(seconds(shape), rel=0.05)


def test_outliers_hardly_count() -> None:
    """One step in fifty that takes twenty times as long moves no prediction by a tenth."""
    model, source = CostModel(TRUE), random.Random(2)
    for number in range(500):
        shape = source.choice(SERVED)
        model.observe(*shape, seconds(shape, slower=20 if number % 50 == 49 else 1))
    for shape in SERVED:
        assert model.predict(*shape) == pytest.approx(seconds(shape), rel=0.1)


def test_a_machine_that_slows_down_is_followed() -> None:
    """When every step takes three times as long, predictions are right again after 400."""
    model, source = CostModel(TRUE), random.Random(3)
    for _ in range(400):
        shape = source.choice(SERVED)
        model.observe(*shape, seconds(shape, slower=3))
    for shape in SERVED:
        assert model.predict(*shape) == pytest.approx(seconds(shape, slower=3), rel=0.1)


def test_one_kind_of_step_does_not_unlearn_the_others() -> None:
    """After 2,000 steps of one stream, a full prefill is still predicted within a tenth."""
    model = CostModel(TRUE)
    for _ in range(2000):
        model.observe(1, 1, 200, seconds((1, 1, 200)))
    assert model.predict(512, 1, 131_000) == pytest.approx(seconds((512, 1, 131_000)), rel=0.1)


def test_a_frozen_model_observes_nothing() -> None:
    """Its cost stays what it was built with."""
    model = CostModel(TRUE, frozen=True)
    model.observe(1, 1, 1, 5.0)
    assert model.cost == TRUE


def test_a_cost_can_be_stored_and_scaled() -> None:
    """It survives JSON, and a machine twice as fast takes half the time."""
    assert msgspec.json.decode(msgspec.json.encode(TRUE), type=StepCost) == TRUE
    assert TRUE.faster(2).predict(*SERVED[3]) == pytest.approx(seconds(SERVED[3]) / 2)


def test_context_counts_what_each_row_attends_to() -> None:
    """A chunk of 3 after 10 tokens attends to 11, 12 and 13; shapes add and remove alike."""
    assert context_tokens(3, 10) == 11 + 12 + 13
    shape = StepShape()
    shape.add(3, 10)
    shape.add(1, 5)
    shape.remove(3, 10)
    assert shape == StepShape(1, 1, 6)
