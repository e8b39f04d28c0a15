"""A model for measurements: one matrix product. meganeura-aot bench/matmul.py --set m=4096 -o out/matmul.py"""

from meganeura_aot import Graph


def build(m: int = 4096, n: int = 4096, k: int = 4096, trans_b: bool = False) -> Graph:
    g = Graph()
    a, b = g.input("a", (m, k)), g.input("b", (n, k) if trans_b else (k, n))
    g.set_outputs({"c": g.matmul(a, b, trans_b=trans_b)})
    return g
