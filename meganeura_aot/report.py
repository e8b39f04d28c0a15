"""Counts of a plan, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .graph import GraphIR
from .memory import lower_bound
from .plan import ExecutionPlan


@dataclass(frozen=True)
class Report:
    """nodes: in the graphs as given; the rest as emitted. Sizes are bytes; scratch_bound: the least any plan needs."""

    nodes: int
    dispatches: int
    pipelines: int
    shaders: int
    buffers: int
    parameter_bytes: int
    state_bytes: int
    scratch_bytes: int
    scratch_bound: int
    total_bytes: int
    operators: tuple[tuple[str, int], ...]

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of every count."""
        return [
            ("nodes", f"{self.nodes}"),
            ("dispatches", f"{self.dispatches}"),
            ("distinct pipelines", f"{self.pipelines}"),
            ("distinct shaders", f"{self.shaders}"),
            ("buffers", f"{self.buffers}"),
            ("parameters", size_text(self.parameter_bytes)),
            ("states", size_text(self.state_bytes)),
            ("scratch", f"{size_text(self.scratch_bytes)} (lower bound {size_text(self.scratch_bound)})"),
            ("memory in all", size_text(self.total_bytes)),
        ]


def size_text(nbytes: int) -> str:
    """Bytes in the unit that keeps the number short."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.2f} {unit}"
    return f"{nbytes} B"


def make_report(graphs: Mapping[str, GraphIR], unshared: ExecutionPlan, plan: ExecutionPlan) -> Report:
    """Counts of a program: its graphs, its plan before and after buffers were shared."""
    dispatches = list(plan.dispatches())
    sizes: Counter[str] = Counter()
    for buffer in plan.buffers.values():
        sizes[buffer.kind] += buffer.nbytes
    return Report(
        nodes=sum(len(graph.nodes) for graph in graphs.values()),
        dispatches=len(dispatches),
        pipelines=len({(d.kernel.text, d.constants) for d in dispatches}),
        shaders=len({d.kernel.text for d in dispatches}),
        buffers=len(plan.buffers),
        parameter_bytes=sizes["parameter"],
        state_bytes=sizes["state"],
        scratch_bytes=sizes["scratch"],
        scratch_bound=lower_bound(unshared),
        total_bytes=sizes.total(),
        operators=tuple(sorted(Counter(d.label for d in dispatches).items())),
    )
