"""What the emitted code may ask of an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .errors import MeganeuraError

MIB = 1 << 20

# The defaults of the WebGPU specification that a compute plan can meet.
WEBGPU_LIMITS: Mapping[str, int] = MappingProxyType(
    {
        "max-storage-buffers-per-shader-stage": 8,
        "max-storage-buffer-binding-size": 128 * MIB,
        "max-buffer-size": 256 * MIB,
        "max-compute-workgroup-storage-size": 16384,
        "max-compute-invocations-per-workgroup": 256,
        "max-compute-workgroups-per-dimension": 65535,
    }
)

# Limits that a plan may raise when a model needs it; kernels never raise the others.
RAISABLE: Mapping[str, int] = MappingProxyType(
    {"max-storage-buffer-binding-size": (2 << 30) - 4, "max-buffer-size": 4 << 30}
)


@dataclass(frozen=True)
class Target:
    """A family of adapters: `webgpu` (core features), `native` (subgroups, f16), `cpu` (software adapters)."""

    name: str
    optional_features: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=lambda: WEBGPU_LIMITS)


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "webgpu": Target("webgpu"),
        "native": Target("native", optional_features=("subgroup", "shader-f16")),
        "cpu": Target("cpu"),
    }
)


def find_target(name: str) -> Target:
    """Return the target called `name`; raises MeganeuraError with the known names."""
    if name not in TARGETS:
        raise MeganeuraError(f"target: expected one of {', '.join(TARGETS)}, got {name!r}")
    return TARGETS[name]
