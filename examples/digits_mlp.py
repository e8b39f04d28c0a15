"""A classifier of handwritten digits: 64 - 64 - 32 - 10, ReLU, softmax. `bash examples/digits.sh` runs it all."""

from meganeura_aot import Graph

LAYERS = {"fc1": (64, 64), "fc2": (64, 32), "fc3": (32, 10)}


def build(batch: int = 397) -> Graph:
    """`batch` images of 8 x 8 pixels in 0 .. 1, to probabilities; the default takes all the held-out images at once."""
    g = Graph()
    h = g.input("x", (batch, 64))
    for name, (n_in, n_out) in LAYERS.items():
        weight = g.parameter(f"{name}.weight", (n_out, n_in))
        bias = g.parameter(f"{name}.bias", (n_out,))
        h = g.bias_add(g.matmul_bt(h, weight), bias)
        if name != "fc3":
            h = g.relu(h)
    g.set_outputs({"probabilities": g.softmax(h)})
    return g
