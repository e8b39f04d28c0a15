"""A batched matrix product with bias, ReLU and a residual in its epilogue, and one whose batch dimensions broadcast."""

from meganeura_aot import Graph


def build(batch: int = 3, rows: int = 17, inner: int = 40, columns: int = 24) -> Graph:
    g = Graph()
    x = g.input("x", (batch, rows, inner))
    residual = g.input("residual", (batch, rows, columns))
    per_batch = g.parameter("per_batch", (batch, inner, columns))
    shared = g.parameter("shared", (columns, columns))
    bias = g.parameter("bias", (columns,))
    hidden = g.relu(g.bias_add(x @ per_batch, bias)) + residual
    g.set_outputs({"hidden": hidden, "mixed": hidden @ shared})
    return g
