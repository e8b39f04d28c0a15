"""The exception tree. Users cause the first four; KernelError and PlanError are bugs of the compiler."""


class MeganeuraError(Exception):
    """Root of every error raised by the compiler."""


class GraphError(MeganeuraError, ValueError):
    """A graph that has no meaning: wrong shapes, dtypes, names or values."""


class GradientError(MeganeuraError):
    """An operator on the path from the loss to a parameter has no gradient."""


class LoweringError(MeganeuraError, NotImplementedError):
    """Operators that cannot become dispatches; all problems of a graph in one message."""


class ModelError(MeganeuraError):
    """A model file that cannot be found, run, or understood."""


class KernelError(MeganeuraError):
    """A template that cannot be rendered, or a dispatch that does not fit its kernel's interface."""


class PlanError(MeganeuraError):
    """A plan that breaks its own rules: aliasing, limits, order, live buffers that share memory."""
