"""The builder's norms, losses and optimizer updates, under the names of PyTorch."""

from __future__ import annotations

from .arguments import Labels, Word
from .builder_ops import Operators
from .errors import GraphError
from .graph import DType
from .op import Op
from .ops.loss.op import BceLoss, CrossEntropyLoss, L1Loss, MseLoss
from .ops.norm.batch import BatchNorm, BatchNormTraining, RunningAverage
from .ops.norm.op import GroupNorm, LayerNorm, RmsNorm
from .tensor import Number, Tensor


class NormOperators(Operators):
    """Everything that looks at whole rows, or at whole parameters."""

    def apply_many(self, op: Op, *inputs: Tensor | Number) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def assign(self, state: Tensor, value: Tensor | Number) -> Tensor:
        raise NotImplementedError

    # norms

    def rms_norm(self, x: Tensor, w: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * w over the last axis"""
        return self.apply(RmsNorm(eps), *(t for t in (x, w) if t is not None))

    def layer_norm(self, x: Tensor, w: Tensor | None = None, b: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * w + b over the last axis"""
        if w is None and b is not None:
            if b.shape != x.shape[-1:]:
                raise GraphError(f"layer_norm: expected a bias of {list(x.shape[-1:])}, got {b.type}")
            return self.add(self.layer_norm(x, eps=eps), b)
        return self.apply(LayerNorm(eps), *(t for t in (x, w, b) if t is not None))

    def group_norm(
        self,
        x: Tensor,
        num_groups: int,
        w: Tensor | None = None,
        b: Tensor | None = None,
        eps: float = 1e-5,
        activation: str = "",
    ) -> Tensor:
        """layer_norm over every image and group of channels of x [N, C, ...], w and b of [C]; activation: "" or "silu" """
        if (w is None) != (b is None):
            raise GraphError(f"group_norm: expected both w and b or neither, got {'b' if w is None else 'w'} alone")
        return self.apply(GroupNorm(num_groups, eps, activation), *(t for t in (x, w, b) if t is not None))

    def batch_norm(
        self,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        w: Tensor | None = None,
        b: Tensor | None = None,
        eps: float = 1e-5,
        training: bool = False,
        momentum: float = 0.1,
    ) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * w + b for each channel of x [N, C, ...] with given statistics, all [C]

        training: with the statistics of the batch over all axes but 1 instead, through which gradients flow. mean and
        variance are states then, which become (1 - momentum) * state + momentum * that of the batch; the variance of the
        batch is biased in y and unbiased in the state, as in PyTorch.
        """
        if x.rank < 2:
            raise GraphError(f"batch_norm: expected rank 2 or more, got {x.type}")
        channels = x.shape[1:2]
        for tensor in (mean, variance, w, b):
            if tensor is not None and tensor.shape != channels:
                raise GraphError(f"batch_norm: expected statistics and weights of {list(channels)}, got {tensor.type}")
        spread = (*channels, *(1,) * (x.rank - 2))
        if training:
            return self._batch_norm_training(x, (mean, variance), (w, b), eps, momentum)
        mean, variance = self.reshape(mean, spread), self.reshape(variance, spread)
        scale = 1.0 if w is None else self.reshape(w, spread)
        shift = 0.0 if b is None else self.reshape(b, spread)
        return self.apply(BatchNorm(eps), x, mean, variance, scale, shift)

    def _batch_norm_training(
        self,
        x: Tensor,
        running: tuple[Tensor, Tensor],
        weights: tuple[Tensor | None, Tensor | None],
        eps: float,
        momentum: float,
    ) -> Tensor:
        w, b = weights
        inputs = (x,) if w is None else (x, w) if b is None else (x, w, b)
        y, *batch = self.apply_many(BatchNormTraining(eps), *inputs)
        count = x.type.size // x.shape[1] if x.shape[1] else 2
        for state, of_batch, factor in zip(running, batch, (1.0, count / (count - 1)), strict=True):
            self.assign(state, self.apply(RunningAverage(1 - momentum, momentum * factor), state, of_batch))
        return self.add(y, self.reshape(b, (*b.shape, *(1,) * (x.rank - 2)))) if w is None and b is not None else y

    # losses: f32 scalars

    def cross_entropy_loss(
        self, logits: Tensor, labels: Labels, ignore_index: Word | None = -100, label_smoothing: float = 0.0
    ) -> Tensor:
        """The mean over rows of -sum(weights * log_softmax(logits)), classes on the last axis

        Labels: u32 class ids of shape logits.shape[:-1], or f32 weights of the shape of the logits, which need not add up
        to 1. Rows whose id is ignore_index, modulo 2^32, do not count: PyTorch's -100 is 0xFFFFFF9C. NaN when no row
        counts, and when an id is no class.
        """
        ids = labels.dtype is DType.U32
        ignored = ignore_index % 2**32 if ids and ignore_index is not None else None
        return self.apply(CrossEntropyLoss(ignored, label_smoothing), logits, labels)

    def bce_loss(self, pred: Tensor, labels: Tensor) -> Tensor:
        """mean(-(t log p + (1 - t) log(1 - p))) of probabilities p, clipped to [0, 1], and labels t

        The same as PyTorch's binary_cross_entropy: each logarithm is at least -100, and the gradient of p is
        (p - t) / max(p (1 - p), 1e-12) / size. This gradient is large where p is 0 or 1 and the label is the other one.
        """
        return self.apply(BceLoss(), pred, labels)

    def mse_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """mean((pred - target)^2)"""
        return self.apply(MseLoss(), pred, target)

    def l1_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """mean(|pred - target|)"""
        return self.apply(L1Loss(), pred, target)
