"""Hooks of a directive: when something is done beside the model's own steps, and what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, cast, get_args

from msgspec import Struct, field

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest import expressions
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.names import use_one_of

HookEvent = Literal[
    "before_step", "after_step", "error", "limit", "thread_started", "thread_continued", "after_complete",
    "context_window_pressure", "directive_return",
]  # fmt: skip
"""The moments of a thread at which hooks are looked at."""
EVENTS: tuple[HookEvent, ...] = get_args(HookEvent)
HookAction = Literal["retry", "continue", "skip", "fail", "abort", "escalate", "suspend"]
"""What a thread does after a hook: the `action` in the output of its directive, or the one the hook names itself."""
ACTIONS: tuple[HookAction, ...] = get_args(HookAction)
_CONTROL: tuple[HookEvent, ...] = ("before_step", "after_step", "error", "limit")
_ORDER = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}
_OPERATORS = ("eq", "ne", *_ORDER, "in", "contains", "regex", "exists")
_WORDS = ("id", "when", "event", "condition", "directive", "inputs", "action", "layer", "description")
_MAX_TEXT = 10_000


class Hook(Struct, frozen=True):
    """A condition, and the item that runs where it holds. The first hook that fits an event decides."""

    item_id: str
    """The item to run; empty for a hook that names its action."""
    item_type: str = "directive"
    events: tuple[HookEvent, ...] = _CONTROL
    when: str = ""
    """An expression over the context of the event; empty where `condition` decides."""
    condition: JsonObject = field(default_factory=dict)
    """`{path, op, value}`, or `any`, `all` or `not` of such; empty holds always."""
    inputs: JsonObject = field(default_factory=dict)
    action: HookAction | None = None

    @property
    def runs_apart(self) -> bool:
        """Whether a thread of its own runs the item."""
        return self.item_type == "directive"

    def fits(self, event: HookEvent, context: JsonObject) -> bool:
        """Whether the hook is for an event in a context; raise `ExpressionFault` for a broken expression."""
        if event not in self.events:
            return False
        return (
            expressions.is_true(expressions.compiled(self.when), context)
            if self.when
            else _holds(self.condition, context)
        )


def hooks_in(written: Json) -> tuple[Hook, ...]:
    """Return the hooks of a checked directive, in order."""
    return tuple(map(_hook, map(as_object, as_list(written))))


def hook_faults(written: Json) -> Iterator[Issue]:
    """Yield every fault of hooks that can be seen without looking at other items."""
    for number, one in enumerate(as_list(written)):
        yield from _faults(as_object(one), f"config.hooks[{number}]")


def _hook(one: JsonObject) -> Hook:
    action, event = as_text(one.get("action")), as_text(one.get("event"))
    called = as_object(one.get("action"))
    return Hook(
        item_id=as_text(one.get("directive")) or as_text(called.get("item_id")),
        item_type=as_text(called.get("item_type")) or "directive",
        events=(cast("HookEvent", event),) if event else _CONTROL,
        when=as_text(one.get("when")),
        condition=as_object(one.get("condition")),
        inputs=as_object(one.get("inputs")) or as_object(called.get("params")),
        action=action if action in ACTIONS else None,
    )


def _faults(one: JsonObject, place: str) -> Iterator[Issue]:
    for word in (word for word in one if word not in _WORDS):
        yield Issue(f"{place}.{word}", "says nothing about a hook", use_one_of(word, _WORDS))
    event = as_text(one.get("event"))
    if event and event not in EVENTS:
        yield Issue(f"{place}.event", f"{event!r:.40} is not an event", use_one_of(event, EVENTS))
    if not (event or one.get("when")):
        yield Issue(place, "has neither `when` nor `event`", "Write `when=\"event.name == 'error'\"`, or an `event`.")
    if one.get("when"):
        try:
            expressions.compiled(as_text(one.get("when")))
        except expressions.ExpressionFault as fault:
            yield Issue(f"{place}.when", f"is no expression: {fault}", "Write one such as `cost.turns > 5`.")
    if one.get("condition"):
        yield from _condition_faults(as_object(one["condition"]), f"{place}.condition", 0)
    action, called = one.get("action"), as_object(one.get("action"))
    if isinstance(action, str) and action not in ACTIONS:
        yield Issue(f"{place}.action", f"{action!r:.40} is not an action", use_one_of(action, ACTIONS))
    if as_text(called.get("primary")) not in {"", "execute"}:
        yield Issue(f"{place}.action.primary", "is not `execute`", "A hook runs an item: write `execute`.")
    if not (one.get("directive") or called.get("item_id") or action in ACTIONS):
        yield Issue(place, "names no directive", "Write `directive`, or an `action`.")


def _condition_faults(condition: JsonObject, place: str, depth: int) -> Iterator[Issue]:
    if depth > expressions.MAX_DEPTH:
        yield Issue(place, f"is nested more than {expressions.MAX_DEPTH} deep", "Make it simpler.")
        return
    match condition:
        case {"any": parts} | {"all": parts} if len(condition) == 1:
            for number, part in enumerate(as_list(parts)):
                yield from _condition_faults(as_object(part), f"{place}[{number}]", depth + 1)
        case {"not": part} if len(condition) == 1:
            yield from _condition_faults(as_object(part), f"{place}.not", depth + 1)
        case {"path": str() as path, "op": str() as op} if path and op in _OPERATORS:
            if op == "regex" and (schema := _schema(condition.get("value"))) is None:
                yield Issue(f"{place}.value", "is not a regular expression", "Write a pattern as text.")
            elif op == "regex" and schema_faults(schema or {}, place):
                yield Issue(f"{place}.value", "is not a regular expression", "Close its brackets.")
        case _:
            fix = f"Write `path`, `op` (one of {', '.join(_OPERATORS)}) and `value`, or `any`, `all` or `not`."
            yield Issue(place, "is not a condition", fix)


def _holds(condition: JsonObject, context: JsonObject) -> bool:
    match condition:
        case {"any": parts}:
            return any(_holds(as_object(part), context) for part in as_list(parts))
        case {"all": parts}:
            return all(_holds(as_object(part), context) for part in as_list(parts))
        case {"not": part}:
            return not _holds(as_object(part), context)
        case {"path": str() as path, "op": str() as op}:
            found = expressions.at_path(context, tuple(path.split(".")))
            value = condition.get("value")
            if op in _ORDER:
                return expressions.is_ordered(_ORDER[op], found, value)
            return op in _COMPARED and _COMPARED[op](found, value)
        case _:
            return not condition


def _matches(found: Json, pattern: Json) -> bool:
    schema = _schema(pattern)
    return isinstance(found, str) and schema is not None and not faults(schema, found[:_MAX_TEXT])


_COMPARED: Mapping[str, Callable[[Json, Json], bool]] = {
    "eq": expressions.is_equal,
    "ne": lambda found, value: not expressions.is_equal(found, value),
    "in": expressions.is_within,
    "contains": lambda found, value: expressions.is_within(value, found),
    "exists": lambda found, value: (found is not None) != (value is False),
    "regex": _matches,
}


def _schema(pattern: Json) -> JsonObject | None:
    # The schema checker bounds the time that a pattern takes, which `re` does not.
    return {"type": "string", "pattern": pattern} if isinstance(pattern, str) else None


def hook_items(written: Json) -> Sequence[tuple[str, str, str]]:
    """Return the items that hooks run: place, name and type of each."""
    return [
        (f"config.hooks[{number}]", hook.item_id, hook.item_type)
        for number, hook in enumerate(hooks_in(written))
        if hook.item_id
    ]
