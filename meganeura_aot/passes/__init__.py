"""Rewrites of a graph, in the order in which they run. Each is `(GraphIR, Target) -> GraphIR` and keeps the meaning."""

from __future__ import annotations

from collections.abc import Callable

from ..graph import GraphIR
from ..target import Target
from .dropout import activate_dropout, advance_dropout
from .epilogue import fuse_epilogue
from .fold_constants import fold_constants
from .fuse_expand import fuse_expand
from .identities import remove_identities
from .join_slices import join_slices
from .prune import prune
from .scatter import fuse_scatter
from .share_twins import share_twins

Pass = Callable[[GraphIR, Target], GraphIR]

CLEANUP: tuple[Pass, ...] = (remove_identities, prune)  # always run, on a graph that is not differentiated any more
PASSES: tuple[Pass, ...] = (
    share_twins,
    join_slices,
    fuse_expand,
    fold_constants,
    fuse_scatter,
    fuse_epilogue,
)  # what `optimize=True` adds


def run_passes(graph: GraphIR, target: Target, passes: tuple[Pass, ...]) -> GraphIR:
    """Run passes one after the other; the graph is verified after each."""
    for rewrite in passes:
        graph = rewrite(graph, target).verify()
    return graph


__all__ = [
    "CLEANUP",
    "PASSES",
    "Pass",
    "activate_dropout",
    "advance_dropout",
    "fold_constants",
    "fuse_epilogue",
    "fuse_expand",
    "fuse_scatter",
    "join_slices",
    "prune",
    "remove_identities",
    "run_passes",
    "share_twins",
]
