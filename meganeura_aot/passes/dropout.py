"""Dropout of a training step: random masks before differentiation, the next step's numbers after it."""

from __future__ import annotations

from dataclasses import replace

from ..errors import GraphError
from ..graph import GraphIR, Node, Value
from ..ops.random.dropout import Dropout, RandomDropout
from ..ops.random.op import STATE, AdvanceCounter
from ..ops.state.leaf import Leaf, State
from .rebuild import Rebuild

RANDOM_STATE = "dropout.rng"  # key and counter


def activate_dropout(graph: GraphIR) -> GraphIR:
    """Every dropout as a random_dropout, each with a place of its own in the numbers of one state.

    Run it before differentiation, and `advance_dropout` after it. Raises GraphError where the state's name is taken.
    """
    rebuild = Rebuild(graph)
    state: Value | None = None
    first = 0
    for index, node in enumerate(graph.nodes):
        value = Value(index)
        if not isinstance(node.op, Dropout):
            rebuild.copy(value)
            continue
        if state is None:
            refuse_taken_name(graph)
            state = rebuild.insert(State(RANDOM_STATE, STATE), (), node.location)
        op = RandomDropout(node.op.p, first)
        first += op.blocks(node.types[0])
        rebuild.moved[value] = rebuild.insert(op, (rebuild.moved[node.inputs[0]], state), node.location)
    return rebuild.finish()


def advance_dropout(graph: GraphIR) -> GraphIR:
    """The graph that, as the last thing it does, moves the random state behind all numbers that it used.

    Whatever reads the state, gradients included, must be in the graph already: it reads the numbers of this step.
    """
    drawn = [
        (node.inputs[1], node.op.first + node.op.blocks(node.types[0]))
        for node in graph.nodes
        if isinstance(node.op, RandomDropout)
    ]
    used = max((end for _, end in drawn), default=0)
    if not used:
        return graph
    return replace(graph, nodes=(*graph.nodes, Node(AdvanceCounter(used), (drawn[0][0],), (STATE,))))


def refuse_taken_name(graph: GraphIR) -> None:
    for node in graph.nodes:
        if isinstance(node.op, Leaf) and node.op.label == RANDOM_STATE:
            raise GraphError(
                f"{node.op.name} {RANDOM_STATE!r} (built at {node.location}): expected another name, got that of the "
                "random state of dropout"
            )
