"""Small training runners as the compiler writes them, and what they compute in NumPy.

The model: error = x * w + b + mean - t, loss = the mean of its squares; `mean` is a state of Stateful, else 0.
"""

import sys
from typing import Any

import numpy as np

from runtime_stub import TrainingRunner, main

HEAD = """
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.x;
"""
ERROR = f"""
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> w: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read> mean: array<f32>;
@group(0) @binding(4) var<storage, read> t: array<f32>;
@group(0) @binding(5) var<storage, read_write> error: array<f32>;
{HEAD}
    if (i < 12) {{ error[i] = x[i] * w[i % 3] + b[i % 3] + mean[i % 3] - t[i]; }}
}}
"""
LOSS = f"""
@group(0) @binding(0) var<storage, read> error: array<f32>;
@group(0) @binding(1) var<storage, read_write> loss: array<f32>;
{HEAD}
    var sum = 0.0;
    for (var k = 0; k < 12; k++) {{ sum += error[k] * error[k]; }}
    if (i == 0) {{ loss[0] = sum / 12.0; }}
}}
"""
GRAD_W = f"""
@group(0) @binding(0) var<storage, read> error: array<f32>;
@group(0) @binding(1) var<storage, read> x: array<f32>;
@group(0) @binding(2) var<storage, read_write> grad: array<f32>;
{HEAD}
    if (i >= 3) {{ return; }}
    var sum = 0.0;
    for (var k = i; k < 12; k += 3) {{ sum += error[k] * x[k]; }}
    grad[i] = sum / 6.0;
}}
"""
GRAD_B = f"""
@group(0) @binding(0) var<storage, read> error: array<f32>;
@group(0) @binding(1) var<storage, read_write> grad: array<f32>;
{HEAD}
    if (i >= 3) {{ return; }}
    var sum = 0.0;
    for (var k = i; k < 12; k += 3) {{ sum += error[k]; }}
    grad[i] = sum / 6.0;
}}
"""
UPDATE = """
@group(0) @binding(0) var<storage, read> grad: array<f32>;
@group(0) @binding(1) var<uniform> n: Numbers;
@group(0) @binding(2) var<storage, read_write> p: array<f32>;
"""
SGD = f"""
struct Numbers {{ lr: f32, momentum: f32, weight_decay: f32 }}
{UPDATE}{HEAD}
    if (i < 3) {{ p[i] -= n.lr * (grad[i] + n.weight_decay * p[i]); }}
}}
"""
MOMENTUM = f"""
struct Numbers {{ lr: f32, momentum: f32, weight_decay: f32 }}
{UPDATE}
@group(0) @binding(3) var<storage, read_write> v: array<f32>;
{HEAD}
    if (i >= 3) {{ return; }}
    v[i] = n.momentum * v[i] + grad[i] + n.weight_decay * p[i];
    p[i] -= n.lr * v[i];
}}
"""
ADAM = f"""
struct Numbers {{
    lr: f32, beta1: f32, rest1: f32, beta2: f32, rest2: f32, eps: f32, weight_decay: f32, bias1: f32, bias2: f32,
}}
override DECOUPLED: u32;
{UPDATE}
@group(0) @binding(3) var<storage, read_write> m: array<f32>;
@group(0) @binding(4) var<storage, read_write> v: array<f32>;
{HEAD}
    if (i >= 3) {{ return; }}
    let decay = n.weight_decay * p[i];
    let g = select(grad[i] + decay, grad[i], DECOUPLED == 1);
    m[i] = n.beta1 * m[i] + n.rest1 * g;
    v[i] = n.beta2 * v[i] + n.rest2 * g * g;
    p[i] -= select(0.0, n.lr * decay, DECOUPLED == 1) + n.lr * (m[i] / n.bias1) / (sqrt(v[i] / n.bias2) + n.eps);
}}
"""
TRACK = f"""
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read_write> seen: array<u32>;
@group(0) @binding(2) var<storage, read_write> mean: array<f32>;
{HEAD}
    if (i < 3) {{ mean[i] = 0.5 * mean[i] + 0.25 * x[i]; }}
    if (i == 0) {{ seen[0] += 1; }}
}}
"""
SPOIL = f"""
@group(0) @binding(0) var<storage, read_write> loss: array<f32>;
{HEAD}
    if (i == 0) {{ loss[0] = 1e30; }}
}}
"""


class Line(TrainingRunner):
    """line: SGD without momentum, two groups of parameters."""

    name = "line"
    optimizer_defaults = {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01, "lr_mult.head": 0.5, "wd_mult.head": 0.0}
    numbers = {"numbers": ("", ""), "numbers_1": ("head", "head")}
    update = SGD
    count = 3

    def buffers(self) -> None:
        self.b_w = self.parameter("w", (3,), nbytes=12, init=("normal", 1.0))
        self.b_b = self.parameter("head.b", (3,), nbytes=12, init="zeros")
        self.declare_states()
        self.moments()
        self.b_grad_w = self.gradient("w", (3,), nbytes=12)
        self.b_grad_b = self.gradient("head.b", (3,), nbytes=12)
        for entry in ("run", "accumulate"):
            x = self.input(entry, "x", (4, 3), nbytes=48)
            t = self.input(entry, "t", (4, 3), nbytes=48)
            setattr(self, f"b_{entry}_x", x)
            setattr(self, f"b_{entry}_t", t)
        self.b_numbers = self.input("apply", "numbers", (self.count,), nbytes=4 * self.count)
        self.b_numbers_1 = self.input("apply", "numbers_1", (self.count,), nbytes=4 * self.count)
        self.b_error = self.buffer("error", nbytes=48)
        self.b_loss = self.buffer("loss", nbytes=4)
        self.output("run", "error", self.b_error, (4, 3))
        self.output("run", "loss", self.b_loss, ())
        self.output("accumulate", "loss", self.b_loss, ())

    def declare_states(self) -> None:
        self.b_mean = self.constant("mean", (3,), [0.0, 0.0, 0.0], nbytes=12)

    def moments(self) -> None:
        self.kept: tuple[tuple[Any, ...], ...] = ((), ())

    def pipelines(self) -> None:
        self.p_error_0 = self.pipeline(ERROR)
        self.p_loss_0 = self.pipeline(LOSS)
        self.p_grad_w_0 = self.pipeline(GRAD_W)
        self.p_grad_b_0 = self.pipeline(GRAD_B)
        self.p_update_0 = self.pipeline(self.update, **self.constants())
        self.p_spoil_0 = self.pipeline(SPOIL)

    def constants(self) -> dict[str, float]:
        return {}

    def bind_groups(self) -> None:
        given = self.b_w, self.b_b, self.b_mean
        x, t = self.b_accumulate_x, self.b_accumulate_t  # type: ignore[attr-defined]
        self.g_run_error_0 = self.bind(self.p_error_0, self.b_run_x, *given, self.b_run_t, self.b_error)  # type: ignore[attr-defined]
        self.g_error_0 = self.bind(self.p_error_0, x, *given, t, self.b_error)
        self.g_loss_0 = self.bind(self.p_loss_0, self.b_error, self.b_loss)
        self.g_grad_w_0 = self.bind(self.p_grad_w_0, self.b_error, x, self.b_grad_w)
        self.g_grad_b_0 = self.bind(self.p_grad_b_0, self.b_error, self.b_grad_b)
        of_w, of_b = self.kept
        self.g_update_0 = self.bind(self.p_update_0, self.b_grad_w, self.b_numbers, self.b_w, *of_w)
        self.g_update_1 = self.bind(self.p_update_0, self.b_grad_b, self.b_numbers_1, self.b_b, *of_b)
        self.g_spoil_0 = self.bind(self.p_spoil_0, self.b_loss)

    def encode_run(self, encoder: Any) -> None:
        encoder.dispatch(self.p_error_0, self.g_run_error_0, 1, 1, 1)
        encoder.dispatch(self.p_loss_0, self.g_loss_0, 1, 1, 1)

    def encode_accumulate(self, encoder: Any) -> None:
        encoder.dispatch(self.p_error_0, self.g_error_0, 1, 1, 1)
        encoder.dispatch(self.p_loss_0, self.g_loss_0, 1, 1, 1)
        encoder.dispatch(self.p_grad_w_0, self.g_grad_w_0, 1, 1, 1)
        encoder.dispatch(self.p_grad_b_0, self.g_grad_b_0, 1, 1, 1)

    def encode_apply(self, encoder: Any) -> None:
        encoder.dispatch(self.p_update_0, self.g_update_0, 1, 1, 1)
        encoder.dispatch(self.p_update_0, self.g_update_1, 1, 1, 1)
        encoder.dispatch(self.p_spoil_0, self.g_spoil_0, 1, 1, 1)  # the memory of the loss is used again

    def run(self, *only: Any, outputs: Any = None, **inputs: Any) -> Any:
        return self.call("run", inputs, *only, outputs=outputs)


class Momentum(Line):
    """momentum: SGD with a velocity."""

    optimizer_defaults = Line.optimizer_defaults | {"momentum": 0.9}
    update = MOMENTUM

    def moments(self) -> None:
        self.b_v_w = self.moment("velocity.w", (3,), nbytes=12)
        self.b_v_b = self.moment("velocity.head.b", (3,), nbytes=12)
        self.kept = (self.b_v_w,), (self.b_v_b,)


class Adam(Line):
    """adam: two moments a parameter."""

    optimizer_kind = "adam"
    optimizer_defaults = {
        "lr": 0.1,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.02,
        "lr_mult.head": 0.5,
        "wd_mult.head": 0.0,
    }
    update = ADAM
    count = 9

    def constants(self) -> dict[str, float]:
        return {"DECOUPLED": int(self.optimizer_kind == "adamw")}

    def moments(self) -> None:
        self.kept = tuple(
            tuple(self.moment(f"{kind}.{name}", (3,), nbytes=12) for kind in "mv") for name in ("w", "head.b")
        )


class AdamW(Adam):
    """adamw: Adam with a weight decay of its own."""

    optimizer_kind = "adamw"


class Stateful(Adam):
    """stateful: Adam on a model with a position and a running mean, which accumulate moves."""

    def declare_states(self) -> None:
        self.b_seen = self.state("seen", (), "u32", nbytes=4)
        self.b_mean = self.state("mean", (3,), nbytes=12)
        self.b_other = self.state("other", (2,), nbytes=8)
        self.advance("accumulate", self.b_seen, 1, limit=100)

    def pipelines(self) -> None:
        super().pipelines()
        self.p_track_0 = self.pipeline(TRACK)

    def bind_groups(self) -> None:
        super().bind_groups()
        self.g_track_0 = self.bind(self.p_track_0, self.b_accumulate_x, self.b_seen, self.b_mean)  # type: ignore[attr-defined]

    def encode_accumulate(self, encoder: Any) -> None:
        encoder.dispatch(self.p_track_0, self.g_track_0, 1, 1, 1)
        super().encode_accumulate(encoder)


class Oracle:
    """The same in float64, without the states."""

    def __init__(self, runner: TrainingRunner) -> None:
        self.kind, self.o, self.t = runner.optimizer_kind, dict(runner.optimizer), 0
        self.p = {name: array.astype(float) for name, array in runner.weights().items()}
        self.m = {name: np.zeros(3) for name in self.p}
        self.v = {name: np.zeros(3) for name in self.p}

    def gradients(self, x: Any, t: Any) -> tuple[float, dict[str, Any]]:
        error = x * self.p["w"] + self.p["head.b"] - t
        return np.mean(error**2), {"w": (error * x).sum(0) / 6, "head.b": error.sum(0) / 6}

    def update(self, gradients: dict[str, Any], lr: float | None = None) -> None:
        self.t += 1
        for name, g in gradients.items():
            head, p, o = name.startswith("head"), self.p[name], self.o
            rate = (o["lr"] if lr is None else lr) * (o["lr_mult.head"] if head else 1)
            decay = o["weight_decay"] * (o["wd_mult.head"] if head else 1)
            if self.kind == "sgd":
                self.v[name] = o["momentum"] * self.v[name] + g + decay * p
                self.p[name] = p - rate * self.v[name]
                continue
            (b1, b2), g = o["betas"], g + (decay * p if self.kind == "adam" else 0)
            self.m[name] = b1 * self.m[name] + (1 - b1) * g
            self.v[name] = b2 * self.v[name] + (1 - b2) * g * g
            step = (self.m[name] / (1 - b1**self.t)) / (np.sqrt(self.v[name] / (1 - b2**self.t)) + o["eps"])
            self.p[name] = p - rate * step - (rate * decay * p if self.kind == "adamw" else 0)


def batches(count: int, seed: int = 0) -> list[dict[str, Any]]:
    draw = np.random.default_rng(seed).standard_normal
    return [{"x": draw((4, 3)).astype("f4"), "t": draw((4, 3)).astype("f4")} for _ in range(count)]


if __name__ == "__main__":
    main(globals()[sys.argv[1]], sys.argv[2:])
