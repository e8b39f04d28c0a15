"""The worst error of every operator family on this adapter: python bench/accuracy.py

Runs every sample of the registry and prints, for each family, the largest error as a share of what the one tolerance rule
allows (0 where results are exact).
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from meganeura_aot import compile_graph
from meganeura_aot.op import OPS, Sample
from tests import harness
from tests.draws import draw
from tests.test_operators import graph_of


def share(sample: Sample, seed: str) -> float:
    """The largest error of the sample's outputs over what is allowed."""
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    recipes = zip(sample.draws(), sample.inputs, strict=True)
    feeds: dict[str, Any] = {f"x{i}": draw(recipe, type_, rng) for i, (recipe, type_) in enumerate(recipes)}
    graph = graph_of(sample)
    expected = harness.evaluate(graph, feeds)
    got = harness.run(compile_graph(graph), feeds)
    worst = 0.0
    for name, value in graph.outputs:
        ref = expected[name]
        allowed = np.broadcast_to(harness.allowed_error(graph, value, feeds, ref), ref.shape)
        with np.errstate(all="ignore"):
            error = np.where(np.isfinite(ref), np.abs(got[name].astype(np.float64) - ref), 0)
            shares = np.where(error == 0, 0, error / allowed)
        finite = np.abs(ref) < 3.4e38
        worst = max(worst, float(shares[finite].max(initial=0)))
    return worst


def main() -> None:
    print(f"{'family':16} {'operators':>9} {'samples':>8}  worst error, share of what is allowed")
    families: dict[str, list[str]] = {}
    for name, op in OPS.items():
        families.setdefault(op.__module__.rsplit(".", 1)[-1], []).append(name)
    for family in sorted(families):
        found = [(share(s, f"{n}-{i}"), n) for n in families[family] for i, s in enumerate(OPS[n].samples())]
        if found:
            worst, name = max(found)
            print(f"{family:16} {len(families[family]):9} {len(found):8}  {worst:.3f} ({name})", flush=True)


if __name__ == "__main__":
    main()
