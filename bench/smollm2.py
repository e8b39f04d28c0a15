"""SmolLM2-135M's shape as a graph to train: `build(tokens=128)`; Hugging Face's names of parameters."""

from __future__ import annotations

from meganeura_aot import Graph, Tensor

VOCABULARY, WIDTH, LAYERS, HEADS, KV_HEADS, INNER = 49152, 576, 30, 9, 3, 1536
ROPE_BASE = 100000.0
KV_WIDTH = WIDTH // HEADS * KV_HEADS
LINEAR = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (KV_WIDTH, WIDTH),
    "self_attn.v_proj": (KV_WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


def layer(g: Graph, h: Tensor, prefix: str) -> Tensor:
    """One block on h [tokens, width]."""

    def linear(name: str, x: Tensor) -> Tensor:
        return g.matmul_bt(x, g.parameter(f"{prefix}.{name}.weight", LINEAR[name], init=("normal", 0.02)))

    def norm(name: str, x: Tensor) -> Tensor:
        return g.rms_norm(x, g.parameter(f"{prefix}.{name}.weight", (WIDTH,), init="ones"))

    n = norm("input_layernorm", h)
    q, k = (
        g.rope(linear(f"self_attn.{which}_proj", n), head_dim=WIDTH // HEADS, base=ROPE_BASE) for which in ("q", "k")
    )
    attended = g.causal_attention(q, k, linear("self_attn.v_proj", n), HEADS, KV_HEADS)
    h = h + linear("self_attn.o_proj", attended)
    n = norm("post_attention_layernorm", h)
    return h + linear("mlp.down_proj", g.swiglu(linear("mlp.gate_proj", n), linear("mlp.up_proj", n)))


def build(tokens: int = 128, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> Graph:
    """Inputs ids and labels, u32 [tokens]; the head is the embedding; the output is the loss."""
    g = Graph()
    ids, labels = g.input("ids", (tokens,), "u32"), g.input("labels", (tokens,), "u32")
    table = g.parameter("model.embed_tokens.weight", (vocabulary, WIDTH), init=("normal", 0.02))
    h = g.embedding(ids, table)
    for index in range(layers):
        h = layer(g, h, f"model.layers.{index}")
    h = g.rms_norm(h, g.parameter("model.norm.weight", (WIDTH,), init="ones"))
    g.set_outputs({"loss": g.cross_entropy_loss(g.matmul_bt(h, table), labels)})
    return g
