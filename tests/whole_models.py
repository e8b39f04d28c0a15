"""Models that are trained here and in PyTorch, from the same weights and data: each twice, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meganeura_aot import Graph

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """parameters, states: shapes by name. inputs: shape and what is drawn: "normal", "below N" (u32), "weights".

    ours: (graph, parameters and states by name, inputs by name) -> loss. theirs: (torch, the same) -> loss.
    """

    parameters: Mapping[str, Shape]
    inputs: Mapping[str, tuple[Shape, str]]
    ours: Callable[[Graph, Any, Any], Any]
    theirs: Callable[[Any, Any, Any], Any]
    states: Mapping[str, Shape] = field(default_factory=dict)

    def build(self) -> Graph:
        g = Graph()
        p = {name: g.parameter(name, shape) for name, shape in self.parameters.items()}
        p |= {name: g.state(name, shape) for name, shape in self.states.items()}
        x = {name: g.input(name, s, "u32" if "below" in how else "f32") for name, (s, how) in self.inputs.items()}
        g.set_outputs({"loss": self.ours(g, p, x)})
        return g

    def weights(self, seed: int = 0) -> dict[str, Array]:
        """Matrices of deviation 1 / sqrt(inputs), weights of norms about 1, small biases."""
        rng = np.random.default_rng(seed)

        def drawn(name: str, shape: Shape) -> Array:
            values = rng.standard_normal(shape)
            if len(shape) > 1:
                return values / np.sqrt(np.prod(shape[1:]))
            return 0.1 * values + (1.0 if "norm" in name and name.endswith("weight") else 0.0)

        return {name: drawn(name, shape).astype(np.float32) for name, shape in self.parameters.items()}

    def batch(self, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)

        def drawn(shape: Shape, how: str) -> Array:
            if how.startswith("below"):
                return rng.integers(0, int(how.split()[1]), shape).astype(np.uint32)
            values = rng.standard_normal(shape).astype(np.float32)
            return np.abs(values) if how == "weights" else values

        return {name: drawn(shape, how) for name, (shape, how) in self.inputs.items()}


def linear(g: Graph, p: Any, name: str, x: Any) -> Any:
    y = g.matmul_bt(x, p[f"{name}.weight"])
    return g.bias_add(y, p[f"{name}.bias"]) if f"{name}.bias" in p else y


def torch_linear(t: Any, p: Any, name: str, x: Any) -> Any:
    return t.nn.functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def layers(**sizes: Shape) -> dict[str, Shape]:
    """weight and bias of linear layers and convolutions: `fc1=(64, 20)` gives fc1.weight and fc1.bias."""
    named = {name.replace("__", "."): shape for name, shape in sizes.items()}
    return {k: v for name, s in named.items() for k, v in ((f"{name}.weight", s), (f"{name}.bias", s[:1]))}


def norms(**channels: int) -> dict[str, Shape]:
    return layers(**{name: (count,) for name, count in channels.items()})


# ---- a perceptron


def mlp(g: Graph, p: Any, x: Any) -> Any:
    h = g.relu(linear(g, p, "fc1", x["x"]))
    return g.cross_entropy_loss(linear(g, p, "fc3", g.tanh(linear(g, p, "fc2", h))), x["y"])


def torch_mlp(t: Any, p: Any, x: Any) -> Any:
    h = torch_linear(t, p, "fc1", x["x"]).relu()
    return t.nn.functional.cross_entropy(torch_linear(t, p, "fc3", torch_linear(t, p, "fc2", h).tanh()), x["y"])


# ---- a convolutional net


def cnn(g: Graph, p: Any, x: Any) -> Any:
    h = g.conv(x["x"], p["conv1.weight"], p["conv1.bias"], padding=1)
    h = g.max_pool(g.relu(g.group_norm(h, 2, p["norm1.weight"], p["norm1.bias"])), 2)
    h = g.avg_pool(g.gelu(g.conv(h, p["conv2.weight"], p["conv2.bias"], padding=1)), 2)
    return g.cross_entropy_loss(linear(g, p, "fc", g.reshape(h, (h.shape[0], -1))), x["y"])


def torch_cnn(t: Any, p: Any, x: Any) -> Any:
    f = t.nn.functional
    h = f.conv2d(x["x"], p["conv1.weight"], p["conv1.bias"], padding=1)
    h = f.max_pool2d(f.group_norm(h, 2, p["norm1.weight"], p["norm1.bias"]).relu(), 2)
    h = f.avg_pool2d(f.gelu(f.conv2d(h, p["conv2.weight"], p["conv2.bias"], padding=1)), 2)
    return f.cross_entropy(torch_linear(t, p, "fc", h.flatten(1)), x["y"])


# ---- a residual block, its batch norms in training mode


def bn(g: Graph, p: Any, name: str, x: Any) -> Any:
    statistics = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    return g.batch_norm(x, *statistics, p[f"{name}.weight"], p[f"{name}.bias"], training=True)


def torch_bn(t: Any, p: Any, name: str, x: Any) -> Any:
    statistics = p[f"{name}.running_mean"], p[f"{name}.running_var"]
    return t.nn.functional.batch_norm(x, *statistics, p[f"{name}.weight"], p[f"{name}.bias"], training=True)


def resnet(g: Graph, p: Any, x: Any) -> Any:
    h = g.relu(bn(g, p, "norm1", g.conv(x["x"], p["conv1.weight"], stride=2, padding=1)))
    h = bn(g, p, "norm2", g.conv(h, p["conv2.weight"], padding=1))
    short = bn(g, p, "norm3", g.conv(x["x"], p["short.weight"], stride=2))
    pooled = g.global_avg_pool(g.relu(h + short))
    return g.cross_entropy_loss(linear(g, p, "fc", pooled), x["y"], label_smoothing=0.1)


def torch_resnet(t: Any, p: Any, x: Any) -> Any:
    f = t.nn.functional
    h = torch_bn(t, p, "norm1", f.conv2d(x["x"], p["conv1.weight"], stride=2, padding=1)).relu()
    h = torch_bn(t, p, "norm2", f.conv2d(h, p["conv2.weight"], padding=1))
    short = torch_bn(t, p, "norm3", f.conv2d(x["x"], p["short.weight"], stride=2))
    pooled = (h + short).relu().mean((2, 3))
    return f.cross_entropy(torch_linear(t, p, "fc", pooled), x["y"], label_smoothing=0.1)


# ---- a U-Net block: down, up both ways, and across


def unet(g: Graph, p: Any, x: Any) -> Any:
    def normed(name: str, h: Any) -> Any:
        return g.group_norm(h, 4, p[f"{name}.weight"], p[f"{name}.bias"], activation="silu")

    time = g.reshape(linear(g, p, "time", g.silu(x["time"])), (2, 8, 1, 1))
    h = g.conv(x["x"], p["in.weight"], p["in.bias"], padding=1)
    across = g.conv(normed("norm1", h), p["conv1.weight"], p["conv1.bias"], padding=1) + time
    low = g.conv(across, p["down.weight"], p["down.bias"], stride=2, padding=1)
    near = g.conv(g.upsample_2x(low), p["near.weight"], p["near.bias"], padding=1)
    up = g.conv_transpose(low, p["up.weight"], p["up.bias"], stride=2, padding=1)
    h = g.concat([near + up, across], axis=1)
    return g.mse_loss(g.conv(normed("norm2", h), p["out.weight"], p["out.bias"], padding=1), x["noise"])


def torch_unet(t: Any, p: Any, x: Any) -> Any:
    f = t.nn.functional

    def normed(name: str, h: Any) -> Any:
        return f.silu(f.group_norm(h, 4, p[f"{name}.weight"], p[f"{name}.bias"]))

    time = torch_linear(t, p, "time", f.silu(x["time"])).reshape(2, 8, 1, 1)
    h = f.conv2d(x["x"], p["in.weight"], p["in.bias"], padding=1)
    across = f.conv2d(normed("norm1", h), p["conv1.weight"], p["conv1.bias"], padding=1) + time
    low = f.conv2d(across, p["down.weight"], p["down.bias"], stride=2, padding=1)
    near = f.conv2d(f.interpolate(low, scale_factor=2), p["near.weight"], p["near.bias"], padding=1)
    up = f.conv_transpose2d(low, p["up.weight"], p["up.bias"], stride=2, padding=1)
    h = t.cat([near + up, across], 1)
    return f.mse_loss(f.conv2d(normed("norm2", h), p["out.weight"], p["out.bias"], padding=1), x["noise"])


# ---- a Llama block whose head is the embedding

VOCABULARY, WIDTH, HEADS, KV_HEADS, TOKENS = 97, 32, 4, 2, 12


def llama(g: Graph, p: Any, x: Any) -> Any:
    head_dim = WIDTH // HEADS
    h = g.embedding(x["ids"], p["embed.weight"])
    n = g.rms_norm(h, p["norm1.weight"])
    q, k = (g.rope(linear(g, p, name, n), head_dim=head_dim) for name in "qk")
    h = h + linear(g, p, "o", g.causal_attention(q, k, linear(g, p, "v", n), HEADS, KV_HEADS))
    n = g.rms_norm(h, p["norm2.weight"])
    h = h + linear(g, p, "down", g.swiglu(linear(g, p, "gate", n), linear(g, p, "up", n)))
    return g.cross_entropy_loss(g.matmul_bt(g.rms_norm(h, p["norm3.weight"]), p["embed.weight"]), x["next"])


def torch_rope(t: Any, x: Any) -> Any:
    """Elements i and i + half of every head turn together."""
    half = x.shape[-1] // 2
    turns = t.arange(x.shape[-2], dtype=x.dtype)[:, None] * 10000.0 ** (-t.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return t.cat([a * turns.cos() - b * turns.sin(), a * turns.sin() + b * turns.cos()], -1)


def torch_heads(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def torch_llama(t: Any, p: Any, x: Any) -> Any:
    f = t.nn.functional

    def norm(name: str, h: Any) -> Any:
        return f.rms_norm(h, (WIDTH,), p[name], 1e-5)

    h = p["embed.weight"][x["ids"]]
    n = norm("norm1.weight", h)
    q = torch_rope(t, torch_heads(torch_linear(t, p, "q", n), HEADS))
    k, v = torch_heads(torch_linear(t, p, "k", n), KV_HEADS), torch_heads(torch_linear(t, p, "v", n), KV_HEADS)
    k, v = (a.repeat_interleave(HEADS // KV_HEADS, 1) for a in (torch_rope(t, k), v))
    o = f.scaled_dot_product_attention(q, k, v, is_causal=True)
    h = h + torch_linear(t, p, "o", o.transpose(1, 2).reshape(h.shape))
    n = norm("norm2.weight", h)
    h = h + torch_linear(t, p, "down", f.silu(torch_linear(t, p, "gate", n)) * torch_linear(t, p, "up", n))
    logits = norm("norm3.weight", h) @ p["embed.weight"].T
    return f.cross_entropy(logits.reshape(-1, VOCABULARY), x["next"].reshape(-1))


# ---- an encoder block after two 1-d convolutions, as Whisper's


def whisper(g: Graph, p: Any, x: Any) -> Any:
    h = g.gelu(g.conv(x["mel"], p["conv1.weight"], p["conv1.bias"], padding=1))
    h = g.gelu(g.conv(h, p["conv2.weight"], p["conv2.bias"], stride=2, padding=1))
    h = g.transpose(h) + p["positions"]
    n = g.layer_norm(h, p["norm1.weight"], p["norm1.bias"])
    q, k, v = (linear(g, p, name, n) for name in "qkv")
    h = h + linear(g, p, "o", g.full_attention(q, k, v, HEADS))
    n = g.layer_norm(h, p["norm2.weight"], p["norm2.bias"])
    h = h + linear(g, p, "fc2", g.gelu(linear(g, p, "fc1", n)))
    return g.mse_loss(g.layer_norm(h, p["norm3.weight"], p["norm3.bias"]), x["target"])


def torch_whisper(t: Any, p: Any, x: Any) -> Any:
    f = t.nn.functional

    def norm(name: str, h: Any) -> Any:
        return f.layer_norm(h, (WIDTH,), p[f"{name}.weight"], p[f"{name}.bias"])

    h = f.gelu(f.conv1d(x["mel"], p["conv1.weight"], p["conv1.bias"], padding=1))
    h = f.gelu(f.conv1d(h, p["conv2.weight"], p["conv2.bias"], stride=2, padding=1))
    h = h.transpose(1, 2) + p["positions"]
    n = norm("norm1", h)
    q, k, v = (torch_heads(torch_linear(t, p, name, n), HEADS) for name in "qkv")
    o = f.scaled_dot_product_attention(q, k, v)
    h = h + torch_linear(t, p, "o", o.transpose(1, 2).reshape(h.shape))
    h = h + torch_linear(t, p, "fc2", f.gelu(torch_linear(t, p, "fc1", norm("norm2", h))))
    return f.mse_loss(norm("norm3", h), x["target"])


def matrices(**sizes: Shape) -> dict[str, Shape]:
    return {f"{name}.weight": shape for name, shape in sizes.items()}


SQUARE, KV = (WIDTH, WIDTH), (WIDTH // HEADS * KV_HEADS, WIDTH)

MODELS: Mapping[str, Model] = {
    "mlp": Model(
        layers(fc1=(48, 20), fc2=(32, 48), fc3=(10, 32)),
        {"x": ((32, 20), "normal"), "y": ((32,), "below 10")},
        mlp,
        torch_mlp,
    ),
    "cnn": Model(
        layers(conv1=(8, 1, 3, 3), conv2=(12, 8, 3, 3), fc=(10, 48)) | norms(norm1=8),
        {"x": ((6, 1, 8, 8), "normal"), "y": ((6,), "below 10")},
        cnn,
        torch_cnn,
    ),
    "resnet": Model(
        matrices(conv1=(8, 4, 3, 3), conv2=(8, 8, 3, 3), short=(8, 4, 1, 1))
        | layers(fc=(5, 8))
        | norms(norm1=8, norm2=8, norm3=8),
        {"x": ((4, 4, 8, 8), "normal"), "y": ((4,), "below 5")},
        resnet,
        torch_resnet,
        {f"norm{i}.running_{kind}": (8,) for i in (1, 2, 3) for kind in ("mean", "var")},
    ),
    "unet": Model(
        {
            **layers(conv1=(8, 8, 3, 3), down=(8, 8, 3, 3), near=(8, 8, 3, 3), out=(3, 16, 3, 3), time=(8, 16)),
            "in.weight": (8, 3, 3, 3),
            "in.bias": (8,),
            "up.weight": (8, 8, 4, 4),
            "up.bias": (8,),
            **norms(norm1=8, norm2=16),
        },
        {"x": ((2, 3, 8, 8), "normal"), "noise": ((2, 3, 8, 8), "normal"), "time": ((2, 16), "normal")},
        unet,
        torch_unet,
    ),
    "llama": Model(
        matrices(
            embed=(VOCABULARY, WIDTH),
            q=SQUARE,
            k=KV,
            v=KV,
            o=SQUARE,
            gate=(80, WIDTH),
            up=(80, WIDTH),
            down=(WIDTH, 80),
        )
        | {f"norm{i}.weight": (WIDTH,) for i in (1, 2, 3)},
        {"ids": ((2, TOKENS), f"below {VOCABULARY}"), "next": ((2, TOKENS), f"below {VOCABULARY}")},
        llama,
        torch_llama,
    ),
    "whisper": Model(
        layers(conv1=(WIDTH, 16, 3), conv2=(WIDTH, WIDTH, 3), q=SQUARE, v=SQUARE, o=SQUARE)
        | layers(fc1=(64, WIDTH), fc2=(WIDTH, 64))
        | matrices(k=SQUARE)
        | norms(norm1=WIDTH, norm2=WIDTH, norm3=WIDTH)
        | {"positions": (10, WIDTH)},
        {"mel": ((2, 16, 20), "normal"), "target": ((2, 10, WIDTH), "normal")},
        whisper,
        torch_whisper,
    ),
}
