"""Which values share a buffer: whole buffers, by liveness, placed largest first.

No arena: one buffer cannot be bound read-only and read-write in one dispatch, and barriers are per buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from .errors import PlanError
from .plan import BufferRef, ExecutionPlan


@dataclass(frozen=True)
class Life:
    """First and last dispatch, over all entries in order, that touches a scratch buffer."""

    first: int
    last: int

    def overlaps(self, other: Life) -> bool:
        return self.first <= other.last and other.first <= self.last


def lives(plan: ExecutionPlan) -> dict[str, Life]:
    """The life of every scratch buffer that holds something. Entries run at different times, so they share."""
    found: dict[str, Life] = {}
    for index, dispatch in enumerate(plan.dispatches()):
        for _, name, _ in dispatch.bindings:
            if plan.buffers[name].kind == "scratch" and plan.buffers[name].type.size:
                found[name] = Life(found[name].first if name in found else index, index)
    return found


def share_buffers(plan: ExecutionPlan) -> ExecutionPlan:
    """The same plan with scratch buffers t0, t1, ... in place of one buffer a value."""
    alive = lives(plan)
    order = sorted(alive, key=lambda name: (-plan.buffers[name].nbytes, alive[name].first, name))
    groups: list[list[str]] = []
    for name in order:
        fits = (g for g in groups if not any(alive[name].overlaps(alive[other]) for other in g))
        group = next(fits, None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    groups.sort(key=lambda group: min(alive[name].first for name in group))
    return _rename(plan, groups, alive)


def _rename(plan: ExecutionPlan, groups: list[list[str]], alive: Mapping[str, Life]) -> ExecutionPlan:
    bound = {name for dispatch in plan.dispatches() for _, name, _ in dispatch.bindings}
    bound |= {output.buffer for entry in plan.entries for output in entry.outputs}
    buffers = {
        name: ref
        for name, ref in plan.buffers.items()
        if ref.kind in ("parameter", "moment", "gradient", "state", "input") or (name in bound and name not in alive)
    }
    renamed: dict[str, str] = {}
    for index, group in enumerate(groups):
        largest = plan.buffers[group[0]]
        name = f"t{index}"
        while name in buffers:
            name += "_"
        held = ", ".join(sorted(group, key=lambda member: alive[member].first))
        buffers[name] = BufferRef(name, "scratch", held, largest.type, largest.nbytes)
        renamed |= dict.fromkeys(group, name)
    entries = tuple(
        replace(
            entry,
            dispatches=tuple(
                replace(d, bindings=tuple((b, renamed.get(name, name), a) for b, name, a in d.bindings))
                for d in entry.dispatches
            ),
            outputs=tuple(replace(o, buffer=renamed.get(o.buffer, o.buffer)) for o in entry.outputs),
        )
        for entry in plan.entries
    )
    return replace(plan, buffers=buffers, entries=entries)


def verify_sharing(before: ExecutionPlan, after: ExecutionPlan) -> None:
    """Raises PlanError when two values that are alive together landed in one buffer, or one that is too small."""
    alive = lives(before)
    home: dict[str, str] = {}
    for old, new in zip(before.dispatches(), after.dispatches(), strict=True):
        for (_, one, _), (_, two, _) in zip(old.bindings, new.bindings, strict=True):
            if home.setdefault(one, two) != two:
                raise PlanError(f"{old.name}: {one} is in {home[one]}, not in {two}")
    guests: dict[str, list[str]] = {}
    for name in alive:
        if after.buffers[home[name]].nbytes < before.buffers[name].nbytes:
            raise PlanError(f"{name}: needs {before.buffers[name].nbytes} bytes, {home[name]} is smaller")
        for other in guests.setdefault(home[name], []):
            if alive[name].overlaps(alive[other]):
                raise PlanError(f"{other} and {name} are alive together and share {home[name]}")
        guests[home[name]].append(name)


def lower_bound(plan: ExecutionPlan) -> int:
    """Bytes of scratch alive at the worst moment: no sharing can need less."""
    change: Counter[int] = Counter()
    for name, life in lives(plan).items():
        change[life.first] += plan.buffers[name].nbytes
        change[life.last + 1] -= plan.buffers[name].nbytes
    return max(accumulate(change[moment] for moment in sorted(change)), default=0)
