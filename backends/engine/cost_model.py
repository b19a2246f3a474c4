"""What a step costs: a small linear model, fitted at warm-up and kept true by every step since.

The features of a step are what its time is made of: a fixed part, its rows (cheap while weights are waited
for, dearer beyond a knee), tiles of rows beyond the first (each reads the weights again), its sequences
(sampling, logits, Python) and the tokens that its rows attend to.
No coefficient is below 0, so that more work is never predicted to take less time.

No machine is that linear. Where a percent matters, which is for draft lengths, a table beside the model says
how far steps of so many rows are off it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

KNEE_ROWS = 64
"""Rows beyond which a row has a price of its own: where devices leave the regime bound by memory."""

DECAY = 0.99
"""What an observation counts for a step later: about the last 100 steps are remembered."""

FIT_SWEEPS, REFRESH_SWEEPS = 2000, 3
SPREAD_DECAY = 0.95
CLIP_SPREADS = 3.0
"""A step further off than so many mean deviations counts as one that is just so far off."""
MIN_CLIP = 0.1

UNSEEN = 0.02
"""How much faster than the model says a step of rows that none had yet is hoped to be. Who compares steps
would else stay with what is well known, and never learn that its neighbour is better.
"""

UNSEEN_STEPS, CORRECTION_STEPS = 2.0, 50.0
"""How many steps that hope counts for, and how many are remembered of those that were."""

SLOWNESS_DECAY = 0.9
"""What makes all steps longer passes, and is told apart from what some rows take: about ten steps."""

EXACT_ROWS = 8
"""Where rows come in no tiles, so many rows are told apart, and then groups of as many."""

Vector = list[float]
Matrix = list[Vector]


class StepShape(Struct):
    """What of a step its cost depends on. `num_context_tokens` sums what each row attends to."""

    num_rows: int = 0
    num_sequences: int = 0
    num_context_tokens: int = 0

    def add(self, num_tokens: int, num_committed: int) -> None:
        """Add a sequence's chunk of `num_tokens` after `num_committed` tokens in the cache."""
        self.num_rows += num_tokens
        self.num_sequences += 1
        self.num_context_tokens += context_tokens(num_tokens, num_committed)

    def remove(self, num_tokens: int, num_committed: int) -> None:
        """Undo an `add`."""
        self.num_rows -= num_tokens
        self.num_sequences -= 1
        self.num_context_tokens -= context_tokens(num_tokens, num_committed)


class StepSample(Struct, frozen=True):
    """A step that was measured."""

    shape: StepShape
    seconds: float


class StepCost(Struct, frozen=True, kw_only=True):
    """Seconds per thing. The default is a small model on two CPU cores, for when nothing was measured.

    A tile has `tile_rows` rows; 0 where rows are not known to come in tiles.
    """

    fixed_s: float = 0.01
    row_s: float = 0.001
    further_row_s: float = 0.001
    sequence_s: float = 0.0
    context_s: float = 2e-6
    tile_s: float = 0.0
    tile_rows: int = 0

    @classmethod
    def guess(cls, tile_rows: int) -> StepCost:
        """The default for an op set's `row_tile`: unpacking weights takes as long as a row and a half."""
        if not tile_rows:
            return cls()
        return cls(row_s=0.0008, further_row_s=0.0008, tile_s=0.0012, tile_rows=tile_rows)

    @property
    def least_row_s(self) -> float:
        """What a sampled row more takes at least, wherever the step stands."""
        return min(self.row_s, self.further_row_s) + self.sequence_s

    def predict(self, num_rows: int, num_sequences: int, num_context_tokens: int) -> float:
        """Seconds of a step; see `StepShape`."""
        return (
            self.fixed_s
            + (
                self.row_s * num_rows
                if num_rows <= KNEE_ROWS
                else self.row_s * KNEE_ROWS + self.further_row_s * (num_rows - KNEE_ROWS)
            )
            + self.sequence_s * num_sequences
            + self.context_s * num_context_tokens
            + self.tile_s * _further_tiles(num_rows, self.tile_rows)
        )

    def faster(self, speed: float) -> StepCost:
        """The cost on a machine that is `speed` times as fast in everything."""
        return self.with_coefficients(value / speed for value in self.coefficients)

    @property
    def coefficients(self) -> Vector:
        """In the order of the features."""
        return [
            self.fixed_s,
            self.row_s,
            self.further_row_s,
            self.sequence_s,
            self.context_s,
            self.tile_s,
        ]

    def with_coefficients(self, coefficients: Iterable[float]) -> StepCost:
        """Others in place of these."""
        fixed_s, row_s, further_row_s, sequence_s, context_s, tile_s = coefficients
        return StepCost(
            fixed_s=fixed_s,
            row_s=row_s,
            further_row_s=further_row_s,
            sequence_s=sequence_s,
            context_s=context_s,
            tile_s=tile_s,
            tile_rows=self.tile_rows,
        )


TYPICAL_SHAPES = (
    StepShape(1, 1, 100),
    StepShape(8, 8, 1600),
    StepShape(64, 64, 16000),
    StepShape(64, 1, 2000),
    StepShape(512, 1, 130_000),
    StepShape(256, 32, 16_000),
)
"""Steps whose predicted costs are not forgotten for want of steps like them."""


class _Correction(Struct):
    """Decayed mean of the relative error of what was predicted of some steps: above 0, they took longer."""

    error: float = -UNSEEN
    num_steps: float = UNSEEN_STEPS

    def add(self, further: float) -> None:
        self.num_steps = min(self.num_steps + 1.0, CORRECTION_STEPS)
        self.error += further / self.num_steps


class CostModel:
    """A `StepCost` that follows what is observed: least squares of relative errors with decay.

    What decays is replaced by the present prediction for `TYPICAL_SHAPES`, so that a long time of one
    kind of step changes nothing about the others. A frozen model observes nothing.
    """

    def __init__(self, cost: StepCost | None = None, *, frozen: bool = False) -> None:
        self.frozen = frozen
        self.refit(cost or StepCost())

    def refit(self, cost: StepCost) -> None:
        """Start again from a cost."""
        self.cost = cost
        self.spread = MIN_CLIP / CLIP_SPREADS
        """Decayed mean of the relative error's size."""
        self._corrections: dict[int, _Correction] = {}
        self._slowness = 0.0
        """What corrections leave of the relative error, over the last steps: the machine's, not the rows'."""
        self._prior, _ = _typical(cost)
        self._moments = [list(row) for row in self._prior]
        self._targets = _product(self._prior, cost.coefficients)

    def predict(self, num_rows: int, num_sequences: int, num_context_tokens: int) -> float:
        """Seconds of a step; see `StepShape`."""
        return self.cost.predict(num_rows, num_sequences, num_context_tokens)

    def predict_corrected(self, num_rows: int, num_sequences: int, num_context_tokens: int) -> float:
        """The same, made right by what steps of about as many rows took, if all rows are sampled from."""
        predicted = self.predict(num_rows, num_sequences, num_context_tokens)
        if num_rows != num_sequences:
            return predicted
        correction = self._corrections.get(self._group(num_rows))
        return predicted * (1.0 + (-UNSEEN if correction is None else correction.error))

    def observe(self, num_rows: int, num_sequences: int, num_context_tokens: int, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        predicted = self.predict(num_rows, num_sequences, num_context_tokens)
        if self.frozen or predicted <= 0:
            return
        clip = max(CLIP_SPREADS * self.spread, MIN_CLIP)
        error = min(max(seconds / predicted - 1, -clip), clip)
        self.spread = SPREAD_DECAY * self.spread + (1 - SPREAD_DECAY) * abs(error)
        if num_rows == num_sequences:
            self._correct(self._corrections.setdefault(self._group(num_rows), _Correction()), error)
        numbers = num_rows, num_sequences, num_context_tokens
        features = [value / predicted for value in _features(*numbers, self.cost.tile_rows)]
        kept = _product(self._prior, self.cost.coefficients)
        for i, value in enumerate(features):
            row, prior = self._moments[i], self._prior[i]
            for j, other in enumerate(features):
                row[j] = DECAY * row[j] + value * other + (1 - DECAY) * prior[j]
            self._targets[i] = DECAY * self._targets[i] + value * (1 + error) + (1 - DECAY) * kept[i]
        self.cost = self.cost.with_coefficients(
            _solve(self._moments, self._targets, self.cost.coefficients, REFRESH_SWEEPS)
        )

    def _correct(self, correction: _Correction, error: float) -> None:
        further = error - self._slowness - correction.error
        if correction.num_steps == CORRECTION_STEPS:  # what is well known tells of the machine
            self._slowness += (1 - SLOWNESS_DECAY) * further
        correction.add(further)

    def _group(self, num_rows: int) -> int:
        """Of rows whose steps are corrected alike: a tile, and each number of rows in the first one."""
        size = self.cost.tile_rows or EXACT_ROWS
        return num_rows if num_rows <= size else size + (num_rows - 1) // size


def fit(samples: Iterable[StepSample], default: StepCost | None = None) -> StepCost:
    """The cost that explains the samples best, by relative error; the default one without samples.

    What they say nothing about keeps a trace of the default's proportions.
    """
    default = default or StepCost()
    known = [sample for sample in samples if sample.seconds > 0]
    if not known:
        return default
    ratios = sorted(sample.seconds / default.predict(*_numbers(sample.shape)) for sample in known)
    start = default.faster(1 / ratios[len(ratios) // 2])
    seen = ((sample.shape, sample.seconds) for sample in known)
    moments, targets = _normal_equations(seen, default.tile_rows)
    # A hundredth of an observation towards the default's proportions: it decides only what nothing else does.
    prior, pull = _typical(start)
    for i, row in enumerate(moments):
        targets[i] += 0.01 * pull[i]
        for j in range(len(row)):
            row[j] += 0.01 * prior[i][j]
    return start.with_coefficients(_solve(moments, targets, start.coefficients, FIT_SWEEPS))


def context_tokens(num_tokens: int, num_committed: int) -> int:
    """What the rows of a chunk attend to, all together: the past, and the chunk up to themselves."""
    return num_tokens * num_committed + num_tokens * (num_tokens + 1) // 2


def _numbers(shape: StepShape) -> tuple[int, int, int]:
    return shape.num_rows, shape.num_sequences, shape.num_context_tokens


def _further_tiles(num_rows: int, tile_rows: int) -> int:
    return (num_rows - 1) // tile_rows if num_rows and tile_rows else 0


def _features(num_rows: int, num_sequences: int, num_context_tokens: int, tile_rows: int) -> Vector:
    few, tiles = min(num_rows, KNEE_ROWS), _further_tiles(num_rows, tile_rows)
    return [1.0, few, num_rows - few, num_sequences, num_context_tokens, tiles]


def _normal_equations(samples: Iterable[tuple[StepShape, float]], tile_rows: int) -> tuple[Matrix, Vector]:
    """Of relative errors: each row of features is divided by the seconds that it explains."""
    size = len(_features(0, 0, 0, 0))
    moments, targets = [[0.0] * size for _ in range(size)], [0.0] * size
    for shape, seconds in samples:
        features = [value / seconds for value in _features(*_numbers(shape), tile_rows)]
        for i, value in enumerate(features):
            targets[i] += value
            for j, other in enumerate(features):
                moments[i][j] += value * other
    return moments, targets


def _typical(cost: StepCost) -> tuple[Matrix, Vector]:
    """As if every typical shape had been seen once, and cost what `cost` says."""
    typical = ((shape, cost.predict(*_numbers(shape))) for shape in TYPICAL_SHAPES)
    return _normal_equations(typical, cost.tile_rows)


def _product(matrix: Matrix, vector: Vector) -> Vector:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def _solve(moments: Matrix, targets: Vector, start: Vector, num_sweeps: int) -> Vector:
    """Non-negative least squares by coordinate descent, from a start that is near already."""
    solution = list(start)
    for _ in range(num_sweeps):
        for i, row in enumerate(moments):
            if row[i] > 0:
                others = sum(a * b for a, b in zip(row, solution, strict=True)) - row[i] * solution[i]
                solution[i] = max(0.0, (targets[i] - others) / row[i])
    return solution
