"""Softmax and the reductions: along the last axis, along inner ones, and over everything."""

from meganeura_aot import Graph


def build(batch: int = 5, rows: int = 12, columns: int = 70) -> Graph:
    g = Graph()
    x = g.input("x", (batch, rows, columns))
    g.set_outputs(
        {
            "softmax": g.softmax(x),
            "log_softmax": g.log_softmax(x, axis=1),
            "row_sums": g.sum(x, axes=(2,)),
            "channel_means": g.mean(x, axes=(0, 2), keepdims=True),
            "column_maxima": g.max(x, axes=(1,)),
            "total": g.sum(x),
        }
    )
    return g
