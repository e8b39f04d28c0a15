"""Draws a trace: picks values, makes leaves, adds calls. It knows numbers of every value, and rejects a call that overflows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meganeura_aot.errors import GraphError
from meganeura_aot.graph import DType, TensorType
from meganeura_aot.reference import evaluate
from tests.fuzz.trace import Array, Ref, Trace, Values

SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 13, 16, 17)
LONG = (31, 32, 33, 47, 64, 65, 70)
MOST_ELEMENTS = 6000
LARGEST = 1e4  # of the numbers that a call may give


class Rejected(Exception):
    """This draw gives no valid call: nothing is added."""


@dataclass(frozen=True)
class Leaf:
    """A named leaf: the builder's method and arguments after the name, its type, how its numbers are drawn."""

    method: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    type: TensorType
    recipe: str


@dataclass
class World:
    """What the entries of one program share: parameters and states by name."""

    leaves: dict[str, Leaf] = field(default_factory=dict)

    def name(self, prefix: str) -> str:
        return f"{prefix}{len(self.leaves)}"

    def role(self, state: str) -> str:
        """What writes it: "assigned", "cache", "position", "key", "mean" or "variance"."""
        return self.leaves[state].recipe


def draw_array(recipe: str, type_: TensorType, rng: np.random.Generator) -> Array:
    """Numbers of a kind: "normal", "positive", "probability", "below N" for u32, "integer"."""
    shape, dtype = type_.shape, type_.dtype.numpy
    if recipe.startswith("below "):
        return rng.integers(0, int(recipe.split()[1]), shape).astype(dtype)
    if recipe == "key":
        return rng.integers(0, 2**32, shape).astype(dtype)
    if type_.dtype is not DType.F32:
        low = 0 if type_.dtype is DType.U32 else -40
        return rng.integers(low, 40, shape).astype(dtype)
    if recipe == "positive":
        return rng.uniform(0.3, 2.0, shape).astype(dtype)
    if recipe == "probability":
        return rng.uniform(0.05, 0.95, shape).astype(dtype)
    if recipe == "mask":  # a third is hidden, never the first key
        hidden = rng.random(shape) < 0.3
        hidden[..., :1] = False
        return np.where(hidden, rng.choice([-np.inf, -1e9], shape), rng.normal(size=shape)).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


class Drawer:
    """One graph under way. r draws its structure, rng the numbers it is tried with."""

    def __init__(self, seed: Sequence[int], world: World, training: bool = False) -> None:
        self.r = random.Random(":".join(map(str, seed)))
        self.rng = np.random.default_rng([*seed])
        self.world, self.training = world, training
        self.trace = Trace()
        self.inputs: dict[str, Leaf] = {}
        self.values = Values(self.trace, {}, {})
        self.pool: list[Ref] = []

    # numbers

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def size(self, long: float = 0.08) -> int:
        if self.chance(0.004):
            return 0
        return self.r.choice(LONG if self.chance(long) else SIZES)

    def shape(self, least: int = 0, most: int = 4) -> tuple[int, ...]:
        rank = self.r.choice([n for n in (0, 1, 2, 2, 3, 3, 4) if least <= n <= most])
        shape = tuple(self.size(0.3 if axis == rank - 1 else 0.05) for axis in range(rank))
        return shape if int(np.prod(shape)) <= MOST_ELEMENTS // 3 else self.shape(least, most)

    def number(self) -> float:
        return self.r.choice([-1.5, -1.0, -0.5, 0.25, 0.5, 1.0, 2.0, round(self.r.uniform(-2, 2), 3)])

    def axis(self, x: Ref) -> int:
        rank = self.type(x).rank
        if not rank:
            raise Rejected
        return self.r.randrange(-rank, rank)

    def axes(self, x: Ref) -> Any:
        rank = self.type(x).rank
        if not rank or self.chance(0.15):
            return None
        if self.chance(0.5):
            return self.axis(x)
        return self.r.sample(range(rank), self.r.randint(1, rank))

    def divisors(self, n: int) -> list[int]:
        return [d for d in range(1, n + 1) if n % d == 0] or [1]

    # values

    def type(self, ref: Ref) -> TensorType:
        return self.trace.type_of(ref)

    def dims(self, ref: Ref) -> tuple[int, ...]:
        return self.type(ref).shape

    def array(self, ref: Ref) -> Array:
        return self.values.of(ref)

    def find(self, fits: Callable[[TensorType], bool]) -> Ref | None:
        """A value of the trace, rather one of the last."""
        found = [ref for ref in self.pool if fits(self.type(ref))]
        if not found:
            return None
        return self.r.choice(found[-4:] if self.chance(0.6) else found)

    def f32(self, least: int = 0, most: int = 9) -> Ref:
        """Any value of floats of a rank in this range."""
        found = None if self.chance(0.1) else self.find(lambda t: t.dtype is DType.F32 and least <= t.rank <= most)
        return found or self.leaf(self.shape(least, min(max(most, least), 4)))

    def like(self, shape: Sequence[int], dtype: str = "f32", fresh: float = 0.4) -> Ref:
        """A value of exactly this shape."""
        shape = tuple(shape)
        found = None if self.chance(fresh) else self.find(lambda t: t.shape == shape and t.dtype == dtype)
        return found or self.leaf(shape, dtype=dtype, recipe="normal" if dtype == "f32" else "integer")

    def partner(self, x: Ref, numbers: bool = True) -> Any:
        """What broadcasts with x: a number, a value of its shape, or one that lacks axes."""
        type_ = self.type(x)
        whole = type_.dtype.is_integer
        if numbers and self.chance(0.2):
            return self.r.randint(1, 9) if whole else self.number()
        if self.chance(0.4):
            return self.like(type_.shape, type_.dtype)
        shape = tuple(n if self.chance(0.7) else 1 for n in type_.shape)[self.r.choice([0, 0, 0, 1, 2]) :]
        return self.like(shape, type_.dtype)

    def integers(self, dtype: str | None = None, least: int = 0) -> Ref:
        wanted = [dtype] if dtype else ["i32", "u32"]
        found = None if self.chance(0.2) else self.find(lambda t: t.dtype in wanted and t.rank >= least)
        return found or self.leaf(self.shape(least, 3), dtype=self.r.choice(wanted), recipe="integer")

    def positive(self, x: Ref | None = None) -> Ref:
        """Numbers away from 0."""
        x = x or self.f32()
        if self.chance(0.3):
            return self.leaf(self.dims(x), recipe="positive")
        return self.one(self.r.choice(["softplus", "sigmoid"]), x) if self.chance(0.5) else self.shifted(x)

    def shifted(self, x: Ref) -> Ref:
        return self.one("add", self.one("mul", x, x), 0.5)

    # leaves

    def leaf(self, shape: Sequence[int], recipe: str = "normal", dtype: str = "f32") -> Ref:
        """An input, a parameter, a constant or a state."""
        shape = tuple(map(int, shape))
        if int(np.prod(shape)) > MOST_ELEMENTS:
            raise Rejected
        kinds = ["input", "input", "parameter", "parameter", "constant", "state"]
        if self.training:
            kinds = ["parameter"] * 3 + ["input"] if recipe in ("normal", "positive") else ["input"]
        kind = self.r.choice(kinds)
        if kind == "constant" and int(np.prod(shape)) <= 24:
            array = draw_array(recipe, TensorType(shape, DType(dtype)), self.rng)
            return self.one("constant", array.round(3) if dtype == "f32" and np.isfinite(array).all() else array)
        if kind == "state" and recipe in ("normal", "integer"):
            return self.state(shape, dtype, "assigned", init=self.r.choice([0, 1, 5]))
        if kind == "parameter":
            storage = "f16" if dtype == "f32" and self.chance(0.2) and not self.training else dtype
            fixed = {"trainable": False} if self.training and self.chance(0.1) else {}
            return self.named("parameter", "w", (shape, storage), fixed, TensorType(shape, DType(dtype)), recipe)
        return self.input(shape, recipe, dtype)

    def input(self, shape: Sequence[int], recipe: str = "normal", dtype: str = "f32") -> Ref:
        type_ = TensorType(tuple(shape), DType(dtype))
        return self.named("input", "x", (type_.shape, dtype), {}, type_, recipe)

    def state(self, shape: Sequence[int], dtype: str, role: str, init: float = 0) -> Ref:
        """A new state, or one of the other entry that is written in the same way."""
        shape = tuple(shape)
        type_ = TensorType(shape, DType("f32" if dtype == "f16" else dtype))
        here = {call.label for call in self.trace.leaves("state", "parameter")}
        for label, leaf in self.world.leaves.items():
            if label not in here and leaf.recipe == role and leaf.arguments == (shape, dtype):
                return self.add(label, leaf)
        return self.named("state", "s", (shape, dtype), {"init": init} if init else {}, type_, role)

    def named(
        self,
        method: str,
        prefix: str,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        type_: TensorType,
        recipe: str,
    ) -> Ref:
        made = Leaf(method, arguments, named, type_, recipe)
        shared = self.inputs if method == "input" else self.world.leaves
        label = f"{prefix}{len(shared)}"
        shared[label] = made
        return self.add(label, made)

    def add(self, label: str, leaf: Leaf) -> Ref:
        if leaf.method == "state":
            start = np.full(leaf.type.shape, leaf.named.get("init", 0), leaf.type.dtype.numpy)
            self.values.states[label] = start.astype(np.float64) if start.dtype.kind == "f" else start
        else:
            self.values.feeds = {**self.values.feeds, label: draw_array(leaf.recipe, leaf.type, self.rng)}
        return self.one(leaf.method, label, *leaf.arguments, **leaf.named)

    # calls

    def call(self, method: str, *arguments: Any, **named: Any) -> list[Ref]:
        """Add a call whose results are numbers of a sensible size; raises Rejected."""
        try:
            call = self.trace.make(method, *arguments, **named)
        except GraphError as error:
            raise Rejected(str(error)) from error
        if call.alone is None:
            self.values.perform(call, evaluate)
        else:
            self.perform(call)
        self.trace.calls.append(call)
        self.pool += call.results
        return list(call.results)

    def perform(self, call: Any) -> None:
        if sum(type_.size for type_ in call.types) > MOST_ELEMENTS:
            raise Rejected
        feeds = {self.values.handles.get(ref, ref.label): self.values.of(ref) for ref in call.operands}
        with np.errstate(all="ignore"):
            results = evaluate(call.alone, feeds)
        for array in results.values():
            if array.dtype.kind == "f" and call.method != "constant" and not np.abs(array).max(initial=0) < LARGEST:
                raise Rejected
        self.values.accept(call, results)

    def one(self, method: str, *arguments: Any, **named: Any) -> Ref:
        return self.call(method, *arguments, **named)[0]
