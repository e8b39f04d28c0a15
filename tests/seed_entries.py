"""Each shader entry and operator of the seed, and the graph that does its work here.

`docs/seed_parity.md` is made from this table; `tests/test_seed_parity.py` runs every graph.
"""

from __future__ import annotations

from collections.abc import Callable

from meganeura_aot import Graph, Tensor
from meganeura_aot.op import Op
from meganeura_aot.ops.attention.op import Attention
from meganeura_aot.ops.conv.gradient import ConvGradWeight
from meganeura_aot.ops.norm.gradient import GroupNormGradX, LayerNormGradX, RmsNormGradX
from meganeura_aot.ops.norm.weight_gradient import GroupNormGradWB, LayerNormGradWB, RmsNormGradW
from meganeura_aot.ops.optimizer.op import AdamUpdate, SgdUpdate, Update

Build = Callable[[Graph], Tensor]


def one(name: str, shape: tuple[int, ...] = (3, 65)) -> Build:
    return lambda g: getattr(g, name)(g.input("x", shape))


def two(name: str) -> Build:
    return lambda g: getattr(g, name)(g.input("a", (3, 65)), g.input("b", (3, 65)))


def product(trans_a: bool = False, trans_b: bool = False, add: bool = False) -> Build:
    def build(g: Graph) -> Tensor:
        a, b = g.input("a", (17, 33) if trans_a else (33, 17)), g.input("b", (65, 17) if trans_b else (17, 65))
        y = g.matmul(a, b, trans_a, trans_b)
        return y + g.input("d", (33, 65)) if add else y

    return build


def attention(name: str, tokens: int = 9, keys: int = 9, **options: object) -> Build:
    def build(g: Graph) -> Tensor:
        q, k, v = g.input("q", (tokens, 6 * 16)), g.input("k", (keys, 2 * 16)), g.input("v", (keys, 2 * 16))
        return getattr(g, name)(q, k, v, heads=6, kv_heads=2, **options)

    return build


def rope_attention(g: Graph) -> Tensor:
    q, k, v = g.input("q", (9, 96)), g.input("k", (9, 32)), g.input("v", (9, 32))
    q, k = g.rope(q, head_dim=16), g.rope(k, head_dim=16)
    return g.causal_attention(q, k, v, heads=6, kv_heads=2)


def attention_gradient(of: int) -> Build:
    """The gradient of q, k or v, as the rule of attention builds it."""

    def build(g: Graph) -> Tensor:
        inputs = [g.input("q", (9, 96)), g.input("k", (9, 32)), g.input("v", (9, 32))]
        op, y = Attention(6, 2), g.attention(*inputs, heads=6, kv_heads=2)
        return op.gradient(g, g.input("dy", (9, 96)), y, *inputs)[of]

    return build


def cache_write(g: Graph) -> Tensor:
    position = g.state("position", (1,), "u32")
    return g.cache_write(g.state("cache", (1, 8, 32)), g.input("rows", (1, 1, 32)), position)


def cached_attention(g: Graph) -> Tensor:
    position = g.state("position", (1,), "u32")
    caches = [g.cache_write(g.state(n, (1, 8, 32)), g.input(f"{n}_row", (1, 1, 32)), position) for n in "kv"]
    return g.cached_attention(g.input("q", (1, 1, 96)), *caches, position, heads=6, kv_heads=2)


def rope_dynamic(g: Graph) -> Tensor:
    return g.rope(g.input("x", (9, 64)), head_dim=16, offset=g.input("position", (), "u32"))


def group_norm(activation: str = "") -> Build:
    def build(g: Graph) -> Tensor:
        x, w, b = g.input("x", (2, 8, 5, 7)), g.parameter("w", (8,)), g.parameter("b", (8,))
        return g.group_norm(x, 4, w, b, activation=activation)

    return build


def norm_grad(op: Callable[..., Op], shape: tuple[int, ...], *more: tuple[int, ...]) -> Build:
    def build(g: Graph) -> Tensor:
        others = (g.input(f"x{i}", each) for i, each in enumerate(more))
        return g.apply(op(), g.input("dy", shape), g.input("x", shape), *others)

    return build


def conv(width: int, outputs: int) -> Build:
    return lambda g: g.conv(g.input("x", (2, 3, width, width)), g.parameter("w", (outputs, 3, 3, 3)), padding=1)


def conv_grad_input(width: int, channels: int, stride: int = 1) -> Build:
    """Of x [2, channels, ...]: the transposed convolution of dy."""
    return lambda g: g.conv_transpose(
        g.input("dy", (2, 3, width, width)), g.parameter("w", (3, channels, 3, 3)), stride=stride, padding=1
    )


def conv_grad_weight(width: int, outputs: int, channels: int) -> Build:
    def build(g: Graph) -> Tensor:
        dy, x = g.input("dy", (2, outputs, width, width)), g.input("x", (2, channels, width, width))
        return g.apply(ConvGradWeight((3, 3), before=(1, 1)), dy, x)

    return build


def optimizer(op: Update) -> Build:
    def build(g: Graph) -> Tensor:
        moments = [g.state(label, (65,)) for label in op.moments]
        numbers = g.input("numbers", (len(op.names),))
        return g.apply(op, g.state("parameter", (65,)), g.input("gradient", (65,)), numbers, *moments)

    return build


def bias(g: Graph) -> Tensor:
    return g.bias_add(g.input("x", (3, 65)), g.parameter("b", (65,)))


def rms_matmul(g: Graph) -> Tensor:
    return g.rms_norm(g.input("x", (3, 64)), g.parameter("w", (64,))) @ g.parameter("p", (64, 65))


def split(part: int) -> Build:
    return lambda g: g.split(g.input("x", (2, 5, 7)), [2, 3], axis=1)[part]


def backward(build: Build) -> Build:
    """The gradient of the operator that `build` ends with, for its first input."""

    def gradient(g: Graph) -> Tensor:
        y = build(g)
        g.set_outputs({"y": y})
        graph = g.build()
        node = graph.nodes[y.value.node]
        inputs = [Tensor(g, value, graph.type_of(value)) for value in node.inputs]
        result: Tensor = node.op.gradient(g, g.input("dy", y.shape), y, *inputs)[0]
        return result

    return gradient


def swiglu_concat_grad(g: Graph) -> Tensor:
    dy, (gate, up) = g.input("dy", (3, 33)), g.split(g.input("x", (3, 66)), 33, axis=1)
    return g.concat([g.swiglu_grad_gate(dy, gate, up), g.swiglu_grad_up(dy, gate)], axis=1)


# Of the enum ShaderEntry, in its order. Text instead of a graph: why there is no row yet, or what stands for it.
SHADER_ENTRIES: dict[str, Build | str] = {
    "MatMul": product(),
    "MatMulAT": product(trans_a=True),
    "MatMulBT": product(trans_b=True),
    "FusedMatMulAdd": product(add=True),
    "FusedMatMulATAdd": product(trans_a=True, add=True),
    "FusedMatMulBTAdd": product(trans_b=True, add=True),
    "Relu": one("relu"),
    "Sigmoid": one("sigmoid"),
    "Tanh": one("tanh"),
    "Neg": one("neg"),
    "Abs": one("abs"),
    "Log": one("log"),
    "Recip": one("recip"),
    "Add": two("add"),
    "Mul": two("mul"),
    "Greater": two("greater"),
    "BiasAdd": bias,
    "SgdUpdate": optimizer(SgdUpdate()),
    "AdamUpdate": optimizer(AdamUpdate()),
    "ScatterAdd": lambda g: g.scatter_add(g.input("ids", (9,), "u32"), g.input("src", (9, 33)), 7),
    "SumAll": one("sum"),
    "MeanAll": one("mean"),
    "Softmax": one("softmax"),
    "CrossEntropyLoss": two("cross_entropy_loss"),
    "BceLoss": two("bce_loss"),
    "Transpose": one("transpose", (33, 65)),
    "Silu": one("silu"),
    "SwiGLU": two("swiglu"),
    "RmsNorm": lambda g: g.rms_norm(g.input("x", (3, 65)), g.parameter("w", (65,))),
    "Embedding": lambda g: g.embedding(g.input("ids", (9,), "u32"), g.parameter("table", (7, 33))),
    "RoPE": lambda g: g.rope(g.input("x", (9, 64)), head_dim=16, offset=3),
    "RoPEGrad": backward(lambda g: g.rope(g.input("x", (9, 64)), head_dim=16, offset=3)),
    "CausalAttention": attention("causal_attention"),
    "CausalAttentionRoPE": rope_attention,
    "SlidingWindowAttention": attention("sliding_window_attention", window=4),
    "Gelu": lambda g: g.gelu(g.input("x", (3, 65)), "tanh"),
    "LayerNorm": lambda g: g.layer_norm(g.input("x", (3, 65)), g.parameter("w", (65,)), g.parameter("b", (65,))),
    "FullAttention": attention("full_attention"),
    "CrossAttention": attention("cross_attention", keys=5),
    "MultiHeadAttn": attention("multi_head_attn"),
    "MultiHeadAttnGradQ": attention_gradient(0),
    "MultiHeadAttnGradK": attention_gradient(1),
    "MultiHeadAttnGradV": attention_gradient(2),
    "SwiGLUGradGate": lambda g: g.swiglu_grad_gate(*(g.input(n, (3, 65)) for n in ("dy", "gate", "up"))),
    "SwiGLUGradUp": lambda g: g.swiglu_grad_up(g.input("dy", (3, 65)), g.input("gate", (3, 65))),
    "SiluGrad": two("silu_grad"),
    "SwiGLUConcat": one("swiglu_concat", (3, 66)),
    "SwiGLUConcatGrad": swiglu_concat_grad,
    "SumRows": lambda g: g.sum(g.input("x", (65, 33)), axes=0),
    "RmsNormGradW": norm_grad(RmsNormGradW, (33, 65), (33,)),
    "RmsNormGradX": norm_grad(RmsNormGradX, (3, 65), (65,)),
    "LayerNormGradWB": norm_grad(LayerNormGradWB, (33, 65), (33, 3)),
    "LayerNormGradX": norm_grad(LayerNormGradX, (3, 65), (65,)),
    "FusedRmsNormMatMul": rms_matmul,
    "RmsNormRsqrt": lambda g: g.rsqrt(g.mean(g.mul(*[g.input("x", (3, 65))] * 2), axes=1) + 1e-5),
    "GroupNorm": group_norm(),
    "GroupNormSilu": group_norm("silu"),
    "GroupNormGradInput": norm_grad(lambda: GroupNormGradX(4), (2, 8, 5, 7), (8,)),
    "GroupNormGradWeightBias": norm_grad(GroupNormGradWB, (2, 8, 5, 7), (2, 4, 3)),
    "Concat": lambda g: g.concat([g.input("a", (2, 3, 5)), g.input("b", (2, 4, 5))], axis=1),
    "SplitA": split(0),
    "SplitB": split(1),
    "Upsample2x": one("upsample_2x", (2, 3, 5, 7)),
    "Upsample2xGrad": backward(one("upsample_2x", (2, 3, 5, 7))),
    "Conv2d": conv(7, 5),
    "Conv2dGemm": conv(24, 64),
    "Conv2dGemmSmall": conv(9, 33),
    "Conv2dGradInput": conv_grad_input(7, 5),
    "Conv2dGradInputGemm": conv_grad_input(24, 64),
    "Conv2dGradInputGemmSmall": conv_grad_input(9, 33),
    "Conv2dGradInputGemmCoop": conv_grad_input(24, 128, stride=2),
    "Conv2dGradWeight": conv_grad_weight(7, 5, 3),
    "Conv2dGradWeightGemm": conv_grad_weight(7, 128, 14),
    "Conv2dGradWeightGemmSmall": conv_grad_weight(7, 33, 3),
    "CacheWrite": cache_write,
    "CachedAttention": cached_attention,
    "RoPEDynamic": rope_dynamic,
    "MaxPool2d": lambda g: g.max_pool(g.input("x", (2, 3, 9, 9)), 3, stride=2, padding=1),
    "GlobalAvgPool": one("global_avg_pool", (2, 3, 5, 7)),
    "GlobalAvgPoolGrad": backward(one("global_avg_pool", (2, 3, 5, 7))),
}

# Of the enum Op, those whose names are not shader entries.
OPERATORS: dict[str, Build | str] = {
    "Input": "a leaf: `Graph.input`",
    "Parameter": "a leaf: `Graph.parameter`",
    "Constant": "a leaf: `Graph.constant`",
    "Nop": "nothing: passes rebuild the graph without it",
    "Identity": lambda g: g.relu(g.reshape(g.input("x", (3, 65)), (65, 3))),
    "LogSoftmax": one("log_softmax"),
}

# Kernels for cooperative matrices, which wgpu-py 0.32 refuses; the kernel that does the work instead.
COOPERATIVE = {
    "MatMul, MatMulAT, MatMulBT, FusedMatMulAdd on cooperative matrices": "matmul (f32 tiles in registers)",
    "Conv2dGemm, Conv2dGradInputGemmCoop on cooperative matrices": "conv (implicit GEMM, f32 tiles in registers)",
    "flash attention on cooperative matrices": "attention (f32 tiles)",
}
