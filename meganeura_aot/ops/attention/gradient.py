"""The gradient of attention, from the log-sum-exp of each query: nothing of size S x T exists here either.

p = exp(score - lse), D = dy.y - dlse, and ds = p * (dy.v - D) is the gradient of a score after the soft cap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...errors import GraphError
from ...graph import TensorType
from ...op import Lowering, Op, Operand, Sample
from ..pointwise.op import GROUP, Array
from .op import Attention, Causal, Full, Mask, Window, weighted
from .schedule import Sizes, choose_gradient

PLAIN = Attention()
ROWS_A_GROUP = 64  # threads of a workgroup of AttentionGradRows, each with one query of one head
TEAM = 64  # threads that share an element of a mask, where it is for as many pairs


def attention_gradient(of: Attention, g: Any, dy: Any, y: Any, *inputs: Any) -> tuple[Any, ...]:
    """dq, dk, dv, and that of the additive mask; dy and y: of the output and of the log-sum-exp. Unused ones are pruned."""
    (out, lse), (d_out, d_lse) = y, dy
    if d_out is None:
        d_out = g.expand(g.constant(0.0), out.shape)
    stat = g.apply(AttentionGradRows(of.heads), d_out, out, lse, *([] if d_lse is None else [d_lse]))
    dq = g.apply(AttentionGradQ(of), d_out, *inputs[:3], stat, *inputs[3:])
    dk, dv = g.apply_many(AttentionGradKV(of), d_out, *inputs[:3], stat, *inputs[3:])
    return dq, dk, dv, *(g.apply(AttentionGradMask(of), d_out, *inputs[:3], stat, mask) for mask in inputs[3:])


@dataclass(frozen=True)
class AttentionGradRows(Op):
    """stat[b, h, i] = (lse[b, h, i], sum_d dy[b, i, h, d] * y[b, i, h, d] - dlse[b, h, i]), f32 [B, H, S, 2].

    Inputs: dy and y f32 [B, S, H * hd], lse f32 [B, H, S], and dlse where there is one; or all without the B.
    """

    tolerance: ClassVar[str] = "contraction"
    heads: int = 1

    def infer(self, dy: TensorType, y: TensorType, lse: TensorType, dlse: TensorType | None = None) -> TensorType:
        expected = TensorType((*y.shape[:-2], self.heads, y.shape[-2]))
        if dy != y or lse != expected or dlse not in (None, expected):
            raise GraphError(f"attention_grad_rows: expected dy as {y} and lse as {expected}, got {dy} and {lse}")
        return TensorType((*expected.shape, 2))

    def reference(self, dy: Array, y: Array, lse: Array, dlse: Array | float = 0.0) -> Array:
        sums = (dy * y).reshape(*y.shape[:-1], self.heads, y.shape[-1] // self.heads).sum(-1).swapaxes(-1, -2)
        return np.stack([lse, sums - dlse], -1)

    def lower(
        self, k: Lowering, dy: Operand, y: Operand, lse: Operand, dlse: Operand | None = None, *, out: Operand
    ) -> None:
        head_dim = y.shape[-1] // self.heads
        element = "f32" if head_dim % 4 else "vec4<f32>"
        reads = {"dy": dy, "y": y, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
        kinds = {"dy": element, "y": element}
        k.dispatch(
            "attention_grad_rows",
            variant={
                "reads": [(name, kinds.get(name, "f32")) for name in reads],
                "head_dim": head_dim,
                "threads": ROWS_A_GROUP,
            },
            bind=reads | {"stat": out},
            const={"ROWS": lse.size, "S": y.shape[-2], "H": self.heads},
            groups=math.ceil(lse.size / ROWS_A_GROUP),
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        def sample(lead: tuple[int, ...], rows: int, heads: int, head_dim: int, dlse: bool) -> Sample:
            y, lse = TensorType((*lead, rows, heads * head_dim)), TensorType((*lead, heads, rows))
            return Sample(cls(heads), (y, y, lse, *[lse] * dlse))

        return [
            sample((2,), 33, 3, 16, True),
            sample((), 129, 5, 64, False),
            sample((2,), 3, 4, 7, True),
            sample((1,), 5, 9, 256, False),
            sample((), 1, 1, 1, True),
            sample((), 0, 2, 8, False),
        ]


@dataclass(frozen=True)
class AttentionGrad(Op, register=False):
    """Base. Inputs: dy and q f32 [B, S, H * hd], k and v f32 [B, T, G * hd], stat f32 [B, H, S, 2], the mask if there is
    one; or the first four without the B. of: the attention that this is the gradient of, without position."""

    tolerance: ClassVar[str] = "contraction"
    of: Attention = PLAIN

    def _check(self, dy: TensorType, q: TensorType, k: TensorType, v: TensorType, stat: TensorType, *mask: Any) -> None:
        y = self.of.infer(q, k, v, *mask)
        expected = TensorType((*q.shape[:-2], self.of.heads, q.shape[-2], 2))
        if dy != y or stat != expected or self.of.with_lse or self.of.split(mask)[1] is not None:
            raise GraphError(f"{self.name}: expected dy as {y} and stat as {expected}, got {dy} and {stat}")

    def pairs(self, dy: Array, q: Array, k: Array, v: Array, stat: Array, *mask: Array) -> tuple[Array, ...]:
        """p, ds (both [B, H, S, T]), the derivative of the scores by q.k, and which pairs are seen."""
        of, size = self.of, self.of.sizes(q, k)
        stat = stat.reshape(size.batch, size.heads, size.queries, 2)
        scores, seen = of.scores(q, k, *mask)
        with np.errstate(all="ignore"):
            slope: Any = of.factor(size)
            if of.soft_cap is not None:
                products = of.per_head(q, size.heads, size) @ of.per_head(k, size.kv_heads, size).swapaxes(-1, -2)
                slope = np.where(seen, slope * (1 - np.tanh(products * slope / of.soft_cap) ** 2), 0)
            p = np.where(seen, np.exp(scores - stat[..., :1]), 0)
            back = of.per_head(dy, size.heads, size) @ of.per_head(v, size.kv_heads, size).swapaxes(-1, -2)
            return p, np.where(seen, p * (back - stat[..., 1:]), 0), slope, seen

    def merged(self, x: Array, like: Array, size: Sizes) -> Array:
        """[B, H, N, hd] to the shape of q, or to that of k: the sum over the heads of q that share one of k."""
        heads = like.shape[-1] // size.head_dim
        x = x.reshape(size.batch, heads, size.heads // heads, x.shape[2], size.head_dim).sum(2)
        return x.transpose(0, 2, 1, 3).reshape(like.shape)

    def describe(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> str:
        y = self.of.describe([*inputs[1:4], *inputs[5:]], inputs[:1]).rsplit(" -> ", 1)[0]
        return f"gradient of {y} -> {', '.join(map(str, outputs))}"

    def _dispatch(self, k: Lowering, own: str, inputs: Sequence[Operand], writes: dict[str, Operand]) -> None:
        """The kernel for the gradient of "q" or "kv", and the sums of its parts."""
        reads = dict(zip(("dy", "q", "k", "v", "stat", "mask"), inputs, strict=False))
        size = self.of.sizes(reads["q"].type, reads["k"].type)
        choice = choose_gradient(size, own)
        split = choice.splits > 1
        parts = {name: k.scratch(TensorType((choice.splits, *out.shape)), name) for name, out in writes.items()}
        parts = parts if split else {}
        variant, const = self.structure(size, reads, writes)
        k.dispatch(
            choice.template,
            variant={**choice.variant, **variant, "split": split},
            bind=reads | (parts or writes),
            const={**const, "GROUPS": choice.groups, "FACTOR": self.of.factor(size)}
            | ({"SPLITS": choice.splits} if split else {}),
            groups=choice.groups,
            label=f"{choice.template}_{own}_{size.head_dim}",
        )
        for name in parts:
            k.dispatch(
                "sum_parts",
                variant={"extras": [], "epilogue": [], "result": "sum"},
                bind={"parts": parts[name], "out": writes[name]},
                const={"SIZE": writes[name].size, "PARTS": choice.splits, "M": 1, "N": 1},
                groups=math.ceil(writes[name].size / GROUP),
                label="sum_parts",
            )

    def structure(self, size: Sizes, reads: Mapping[str, Operand], writes: Mapping[str, Operand]) -> tuple[Any, Any]:
        """Variant and numbers that all kernels here share."""
        element = "f32" if size.head_dim % 4 else "vec4<f32>"
        kinds = {"stat": "vec2<f32>", "mask": "f32", "dmask": "f32"}
        variant, const = self.of.structure(size, reads.get("mask"))
        variant |= {name: [(n, kinds.get(n, element)) for n in x] for name, x in (("reads", reads), ("writes", writes))}
        return variant | {"position": ""}, const


class AttentionGradQ(AttentionGrad):
    """dq[i, h] = sum_t scale * ds[h, i, t] * k[t, h // (H / G)], with the slope of the soft cap; f32 [B, S, H * hd]."""

    def infer(self, *types: TensorType) -> TensorType:
        self._check(*types)
        return types[1]

    def reference(self, dy: Array, q: Array, k: Array, v: Array, *others: Array) -> Array:
        size = self.of.sizes(q, k)
        _, ds, slope, seen = self.pairs(dy, q, k, v, *others)
        with np.errstate(all="ignore"):
            return self.merged(weighted(slope * ds, seen, self.of.per_head(k, size.kv_heads, size)), q, size)

    def lower(self, k: Lowering, *inputs: Operand, out: Operand) -> None:
        self._dispatch(k, "q", inputs, {"dq": out})

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(of), types, draws) for of, types, draws in gradient_samples()]


class AttentionGradKV(AttentionGrad):
    """dk[t, g] = sum_h sum_i scale * ds[h, i, t] * q[i, h] over the heads h of group g, with the slope of the soft cap;
    dv[t, g] = sum_h sum_i p[h, i, t] * dy[i, h]. Both f32 [B, T, G * hd]."""

    def infer(self, *types: TensorType) -> tuple[TensorType, TensorType]:
        self._check(*types)
        return types[2], types[3]

    def reference(self, dy: Array, q: Array, k: Array, v: Array, *others: Array) -> tuple[Array, Array]:
        of, size = self.of, self.of.sizes(q, k)
        p, ds, slope, seen = (np.swapaxes(x, -1, -2) if np.ndim(x) else x for x in self.pairs(dy, q, k, v, *others))
        with np.errstate(all="ignore"):
            dk = weighted(slope * ds, seen, of.per_head(q, size.heads, size))
            dv = weighted(p, seen, of.per_head(dy, size.heads, size))
        return self.merged(dk, k, size), self.merged(dv, v, size)

    def lower(self, k: Lowering, *inputs: Operand, out: Any) -> None:
        self._dispatch(k, "kv", inputs, dict(zip(("dk", "dv"), out, strict=True)))

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(of), types, draws) for of, types, draws in gradient_samples()]


class AttentionGradMask(AttentionGrad):
    """dmask = ds, summed over the axes that the mask is broadcast over; f32, of the shape of the mask."""

    def infer(self, *types: TensorType) -> TensorType:
        self._check(*types)
        return types[5]

    def reference(self, dy: Array, q: Array, k: Array, v: Array, stat: Array, mask: Array) -> Array:
        ds = self.pairs(dy, q, k, v, stat, mask)[1]
        padded = (1,) * (4 - mask.ndim) + mask.shape
        over = tuple(axis for axis in range(4) if padded[axis] == 1)
        return np.asarray(ds.sum(over, keepdims=True).reshape(mask.shape))

    def lower(self, k: Lowering, *inputs: Operand, out: Operand) -> None:
        reads = dict(zip(("dy", "q", "k", "v", "stat", "mask"), inputs, strict=True))
        size = self.of.sizes(reads["q"].type, reads["k"].type)
        full = (size.batch, size.heads, size.queries, size.keys)
        axes = (1,) * (4 - len(out.shape)) + out.shape
        over = [whole if axis == 1 else 1 for axis, whole in zip(axes, full, strict=True)]
        team = TEAM if math.prod(over) >= TEAM else 1
        variant, const = self.structure(size, reads, {"dmask": out})
        const |= {"SIZE": out.size, "HEADS": axes[1], "ROWS": axes[2], "COLUMNS": axes[3], "OVER": math.prod(over)}
        const |= {"OVER_H": over[1], "OVER_S": over[2], "OVER_T": over[3]}
        groups = out.size if team > 1 else math.ceil(out.size / TEAM)
        k.dispatch(
            "attention_grad_mask",
            variant={**variant, "team": team, "split": False, "padded": False},
            bind={**reads, "dmask": out},
            const=const | {"GROUPS": groups},
            groups=groups,
        )

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        return [Sample(cls(of), types, draws) for of, types, draws in gradient_samples() if len(types) == 6]


def gradient_samples() -> list[tuple[Attention, tuple[TensorType, ...], tuple[str, ...]]]:
    """The attention, the types of all inputs, how they are drawn."""

    def sample(s: int, t: int, heads: tuple[int, int], hd: int, mask: Mask, *bias: Any, **options: Any) -> Any:
        """bias: shape and recipe of an additive mask; batch and draw as options, the rest are attributes."""
        lead = (options.pop("batch"),) if "batch" in options else ()
        recipe = options.pop("draw", "normal")
        q, kv = TensorType((*lead, s, heads[0] * hd)), TensorType((*lead, t, heads[1] * hd))
        types = (q, q, kv, kv, TensorType((*lead, heads[0], s, 2)), *(TensorType(shape) for shape, _ in bias))
        return Attention(*heads, mask, **options), types, (*[recipe] * 4, "normal", *(how for _, how in bias))

    cases = [sample(33, 33, (6, 2), 16, Causal(), batch=2)]
    lengths, masks = (33, 1, 128, 32, 31, 129), (Causal(), Window(5), Full(), Window(200))
    for n, hd in enumerate((8, 40, 64, 72, 80, 96, 160, 256)):
        heads = ((9, 3), (15, 5), (5, 1), (7, 7))[n % 4]
        cases.append(sample(lengths[n % 6], lengths[n * 2 % 5], heads, hd, masks[n % 4]))
    return cases + [
        sample(300, 300, (6, 2), 8, Causal()),
        sample(33, 40, (3, 1), 7, Causal(7)),
        sample(5, 12, (4, 4), 1, Causal(-2)),
        sample(33, 33, (2, 2), 4, Window(1)),
        sample(70, 90, (4, 2), 12, Window(9, offset=20), batch=2),
        sample(20, 33, (4, 2), 12, Causal(-7)),
        sample(3, 5, (2, 1), 8, Causal(-9)),
        sample(17, 40, (4, 2), 8, Full(), ((2, 4, 17, 40), "mask"), batch=2),
        sample(17, 40, (4, 2), 6, Full(), ((17, 40), "mask")),
        sample(17, 17, (4, 2), 8, Causal(), ((2, 1, 1, 17), "mask"), batch=2),
        sample(3, 40, (4, 2), 8, Full(), ((4, 1, 40), "mask with nan")),
        sample(12, 40, (4, 2), 8, Causal(28), ((1, 1, 12, 1), "mask"), soft_cap=3.0),
        sample(9, 20, (4, 2), 8, Window(4), ((), "normal"), batch=2),
        sample(40, 70, (2, 1), 16, Causal(), draw="one nan"),
        sample(33, 33, (2, 1), 16, Causal(), draw="small", scale=-3.0),
        sample(33, 33, (2, 1), 16, Window(8), soft_cap=1.5),
        sample(3, 0, (2, 1), 8, Full()),
        sample(0, 3, (2, 1), 8, Causal()),
    ]
