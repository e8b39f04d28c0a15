"""How test inputs are drawn: each recipe is a kind of numbers that kernels get wrong."""

from __future__ import annotations

from typing import Any

import numpy as np

from meganeura_aot.graph import DType, TensorType
from runtime_stub.optimizer import adam_numbers, sgd_numbers

Array = np.ndarray[Any, Any]

NUMBERS = {
    "sgd numbers": sgd_numbers(0.1, momentum=0.9, weight_decay=0.01),
    "adam numbers": adam_numbers(0.05, 3, weight_decay=0.1),
}

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -0.5, -2.5, np.inf, -np.inf, np.nan, 88.0, -88.0, 200.0, -200.0, 3.0]
SPECIAL += [1e-30, -1e-30, 6e4, -13.24, 20.6, 0.9999999, 1.0000001, 1e30, -1e30, 2147483648.0, -2147483904.0, 4.3e9]


def draw(recipe: str, type_: TensorType, rng: np.random.Generator) -> Array:
    """An array of this type. small and negative fill every row with such numbers alone."""
    shape = type_.shape
    if recipe in NUMBERS:
        return NUMBERS[recipe]
    if recipe.startswith("below "):  # indices
        return rng.integers(0, int(recipe.split()[1]), shape).astype(type_.dtype.numpy)
    if recipe.startswith("outside "):  # indices that are too large, the first one and a third of the others
        limit = int(recipe.split()[1])
        indices = rng.integers(0, limit + limit // 2, shape).astype(type_.dtype.numpy)
        indices.reshape(-1)[:1] = limit
        return indices
    if recipe == "zero":
        return np.zeros(shape, type_.dtype.numpy)
    if type_.dtype is not DType.F32:
        return draw_integers(type_, rng)
    if recipe == "small":
        values = 10.0 ** rng.uniform(-30, -3, shape) * rng.choice([-1, 1], shape)
    elif recipe == "negative":
        values = rng.uniform(-90, -5, shape)
    elif recipe == "positive":
        values = 10.0 ** rng.uniform(-3, 3, shape)
    elif recipe == "near zero":  # and far enough from it for finite differences
        values = 10.0 ** rng.uniform(-3, -1, shape) * rng.choice([-1, 1], shape)
    elif recipe == "near one":
        values = 10.0 ** rng.uniform(-1, 1, shape)
    elif recipe == "large":
        values = rng.normal(size=shape) * 50
    elif recipe == "offset":  # a mean that hides the deviation from sums of squares
        values = 1e4 + rng.normal(size=shape) * 2
    elif recipe == "probability":  # exactly 0 and 1 among them
        values = np.clip(rng.uniform(-0.2, 1.2, shape), 0, 1)
    elif recipe == "inner probability":
        values = rng.uniform(0.05, 0.95, shape)
    elif recipe == "one nan":
        values = rng.normal(size=shape)
        values.reshape(-1)[rng.integers(values.size)] = np.nan
    elif recipe.startswith("mask"):  # to be added to scores: a third hides, and all of the first row (the last axis)
        edge = -1e9 if recipe != "mask off the edge" else -2e9
        hiding = rng.choice([-np.inf, edge, -3.4e38], shape)
        values = np.where(rng.random(shape) < 0.3, hiding, rng.normal(size=shape))
        values.reshape(-1, shape[-1])[0] = hiding.reshape(-1, shape[-1])[0]
        if recipe == "mask with nan":
            values.reshape(-1, shape[-1])[-1, 0] = np.nan
    elif recipe == "special":
        values = rng.choice(SPECIAL, shape)
        values.reshape(-1)[: len(SPECIAL)] = rng.permutation(SPECIAL)[: values.size]
    else:
        assert recipe == "normal", recipe
        values = rng.normal(size=shape) * 2
    return np.asarray(values, dtype=np.float32)


def draw_integers(type_: TensorType, rng: np.random.Generator) -> Array:
    """Small and large integers, the extremes among them."""
    limits = np.iinfo(type_.dtype.numpy)
    wide = rng.integers(limits.min, limits.max, type_.shape, dtype=type_.dtype.numpy, endpoint=True)
    narrow = rng.integers(max(limits.min, -40), 40, type_.shape).astype(type_.dtype.numpy)
    values = np.asarray(np.where(rng.random(type_.shape) < 0.5, wide, narrow), dtype=type_.dtype.numpy)
    edges = np.array([limits.min, limits.max, 0, 1, 31, 32, 33], dtype=type_.dtype.numpy)
    values.reshape(-1)[: len(edges)] = rng.permutation(edges)[: values.size]
    return values
