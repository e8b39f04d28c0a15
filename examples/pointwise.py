"""Chains of pointwise operators, with broadcasting."""

from meganeura_aot import Graph


def build(rows: int = 33, columns: int = 20) -> Graph:
    g = Graph()
    x = g.input("x", (rows, columns))
    y = g.input("y", (rows, columns))
    scale = g.parameter("scale", (columns,))
    shift = g.parameter("shift", (rows, 1))
    gate = g.sigmoid(x * scale + shift)
    mixed = gate * g.tanh(y) + (1.0 - gate) * g.clip(y, -2.0, 2.0)
    distance = g.sqrt((x - y) * (x - y) + 1.0)
    picked = g.where(g.relu(x), g.maximum(x, y), g.minimum(x, y))
    g.set_outputs({"mixed": mixed, "picked": picked, "closeness": g.exp(-distance)})
    return g
