"""Rewrites of a graph, in the order in which they run. Each is `(GraphIR, Target) -> GraphIR` and keeps the meaning."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import GraphIR
from ..target import Target
from .epilogue import fuse_epilogue
from .prune import prune
from .share_twins import share_twins

Pass = Callable[[GraphIR, Target], GraphIR]

CLEANUP: tuple[Pass, ...] = (prune,)  # always run
PASSES: tuple[Pass, ...] = (share_twins, fuse_epilogue)  # what `optimize=True` adds


def run_passes(graph: GraphIR, target: Target, passes: tuple[Pass, ...]) -> GraphIR:
    """Run passes one after the other; the graph is verified after each."""
    for rewrite in passes:
        graph = rewrite(graph, target).verify()
    return graph


__all__ = ["CLEANUP", "PASSES", "Pass", "fuse_epilogue", "prune", "run_passes", "share_twins"]
