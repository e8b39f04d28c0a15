"""meganeura_aot: compile a neural-network graph into one readable file that runs it on any GPU."""

from .builder import Graph
from .compiler import Program, compile_graph
from .errors import (
    GradientError,
    GraphError,
    KernelError,
    LoweringError,
    MeganeuraError,
    ModelError,
    PlanError,
)
from .ops.attention.op import Causal, Full, Window
from .tensor import Tensor
from .training import Training
from .version import VERSION as __version__

__all__ = [
    "Causal",
    "Full",
    "GradientError",
    "Graph",
    "GraphError",
    "KernelError",
    "LoweringError",
    "MeganeuraError",
    "ModelError",
    "PlanError",
    "Program",
    "Tensor",
    "Training",
    "Window",
    "__version__",
    "compile_graph",
]
