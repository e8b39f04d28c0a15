"""Python names for the emitted file: unique, readable, and stable under small changes of the model."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass

from .plan import Dispatch, ExecutionPlan


@dataclass(frozen=True)
class Names:
    """buffers, groups: attribute names by buffer and dispatch name. pipelines: by (shader, constants).
    shaders: constants by WGSL text, in order of first use."""

    buffers: dict[str, str]
    groups: dict[str, str]
    pipelines: dict[tuple[str, tuple[tuple[str, int | float], ...]], str]
    shaders: dict[str, str]

    def pipeline(self, dispatch: Dispatch) -> str:
        return self.pipelines[(dispatch.kernel.text, dispatch.constants)]


def identifier(text: str) -> str:
    """`text` as a Python identifier: every other character becomes an underscore."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII) or "_"
    return f"_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def unique(name: str, taken: Iterable[str]) -> str:
    """`name`, or name_2, name_3, ... where it is taken."""
    used = set(taken)
    number, result = 2, name
    while result in used:
        result = f"{name}_{number}"
        number += 1
    return result


def choose_names(plan: ExecutionPlan, reserved: Iterable[str] = ()) -> Names:
    """Names in the order of the plan. reserved: module-level names that a shader may not take."""
    names = Names({}, {}, {}, {})
    for buffer in plan.buffers:
        names.buffers[buffer] = unique(f"b_{identifier(buffer)}", names.buffers.values())
    for dispatch in plan.dispatches():
        names.groups[dispatch.name] = unique(f"g_{identifier(dispatch.name)}", names.groups.values())
        text, label = dispatch.kernel.text, identifier(dispatch.label)
        if text not in names.shaders:
            names.shaders[text] = unique(label.upper(), [*names.shaders.values(), *reserved])
        key = (text, dispatch.constants)
        if key not in names.pipelines:
            base = names.shaders[text].lower()
            number = sum(1 for shader, _ in names.pipelines if shader == text)
            names.pipelines[key] = unique(f"p_{base}_{number}", names.pipelines.values())
    return names
