"""Composites as they are written: their steps, what each one depends on, and every fault of them with its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, convert

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.expressions import Applied, DottedPath, Expression, ExpressionFault, compiled
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.templates import pieces, placeholders, variables

FAIL, SKIP = "fail", "skip"
"""What `on_error` may say besides the id of a step that stands in."""
_RESERVED = ("steps", "item", "index", "answer")
_OF_STEP = ("result", "status", "error")
_MISTAKEN = ("{steps", "{item", "{index", "{answer")
_NUMBERS = frozenset({"integer", "number"})


class StepRetry(Struct, frozen=True):
    """How often a call is made until it succeeds, and how long it waits before it is made again."""

    attempts: int = 1
    backoff_ms: int = 1_000
    max_backoff_ms: int = 30_000


class StepQuestion(Struct, frozen=True):
    """What a step asks the owner."""

    message: str
    schema: JsonObject = {}
    expires: float | None = None
    """For how many seconds it waits; None for as long as questions of threads do."""


class CompositeStep(Struct, frozen=True):
    """One step: a call of an item, a question to the owner, or a question before a call."""

    id: str
    tool: str = ""
    parameters: JsonObject = {}
    needs: tuple[str, ...] = ()
    foreach: Json | UnsetType = UNSET
    when: str = ""
    ask: StepQuestion | None = None
    timeout: float | None = None
    retry: StepRetry = StepRetry()
    on_error: str = FAIL

    @property
    def stand_in(self) -> str:
        """The step that takes the place of this one if it fails; empty if there is none."""
        return "" if self.on_error in {FAIL, SKIP} else self.on_error

    @property
    def templates(self) -> Mapping[str, Json]:
        """The keys of the step that may name values."""
        asked = {"ask.message": self.ask.message} if self.ask else {}
        each = {} if isinstance(self.foreach, UnsetType) else {"foreach": self.foreach}
        return {"parameters": self.parameters, **each, **asked}

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield the values that the step names, each with its place in the step."""
        for place, template in self.templates.items():
            for name in placeholders(template):
                yield place, name
        try:
            yield from (("when", ".".join(names)) for names in (_paths(compiled(self.when)) if self.when else ()))
        except ExpressionFault:
            return

    def depends_on(self) -> tuple[str, ...]:
        """Return the ids of the steps that must have ended before this one begins."""
        named = (path.split(".") for _, path in self.paths())
        return tuple(dict.fromkeys([*self.needs, *(one[1] for one in named if one[0] == "steps" and len(one) > 1)]))


class Composite(Struct, frozen=True):
    """The steps of a composite, its result and its limit of time in seconds."""

    steps: tuple[CompositeStep, ...]
    output: Json | UnsetType = UNSET
    timeout: float | None = None


def read_composite(config: JsonObject) -> Composite:
    """Return the steps of a config that fits the schema of its type; steps without an id are numbered."""
    steps: list[Json] = []
    for number, one in enumerate(map(as_object, as_list(config.get("steps"))), start=1):
        asked = one.get("ask")
        question: JsonObject = {"ask": {"message": asked}} if isinstance(asked, str) else {}
        steps.append({"id": f"step_{number}", **one, **question})
    return convert({**config, "steps": steps}, Composite)


def checked_composite(manifest: Manifest) -> Composite:
    """Return the steps of a composite; refuse one with faults, with all of them."""
    if found := [issue for issue in composite_faults(manifest) if issue.is_error]:
        raise InvalidManifest(manifest.tool_id, found)
    return read_composite(manifest.config)


def composite_faults(manifest: Manifest) -> list[Issue]:
    """Return every fault of the steps that shows without the items they call; the schema of the type has passed."""
    composite = read_composite(manifest.config)
    declared = as_object(manifest.parameters.get("properties"))
    fix = "Give the parameter another name."
    found = [
        Issue(f"parameters.{name}", f"`{name}` has a meaning of its own in a composite", fix)
        for name in _RESERVED
        if name in declared
    ]
    found += [issue for at in range(len(composite.steps)) for issue in _step_faults(composite, at, declared)]
    found += _circles(composite)
    if not isinstance(composite.output, UnsetType):
        ids = [step.id for step in composite.steps]
        found += _template_faults("config.output", composite.output)
        for name in placeholders(composite.output):
            found += _name_faults("config.output", name, declared, ids, ids, ())
    return found


def _step_faults(composite: Composite, at: int, declared: JsonObject) -> Iterator[Issue]:
    step, place = composite.steps[at], f"config.steps[{at}]"
    ids = [one.id for one in composite.steps]
    before = ids[:at]
    is_repeated = not isinstance(step.foreach, UnsetType)
    if step.id in before:
        yield Issue(f"{place}.id", f"`{step.id}` is the id of another step too", "Give each step an id of its own.")
    for number, need in enumerate(step.needs):
        yield from _order_faults(f"{place}.needs[{number}]", need, ids, before)
    extra = [*(["item", "index"] if is_repeated else ()), *(["answer"] if step.ask and step.tool else ())]
    for where, name in dict.fromkeys(step.paths()):
        yield from _name_faults(f"{place}.{where}", name, declared, ids, before, () if where == "foreach" else extra)
    for where, template in step.templates.items():
        yield from _template_faults(f"{place}.{where}", template)
    try:
        if step.when:
            compiled(step.when)
    except ExpressionFault as fault:
        yield Issue(f"{place}.when", f"is no expression: {fault}", "Write one such as `steps.a.result.count > 0`.")
    if step.ask and is_repeated:
        yield Issue(f"{place}.ask", "cannot be asked for each element", "Ask in a step of its own, before this one.")
    if step.ask:
        yield from schema_faults(step.ask.schema, f"{place}.ask.schema")
    if not step.tool:
        plain = CompositeStep(step.id)
        unused = ("foreach", "timeout", "retry", "parameters")
        for word in (word for word in unused if getattr(step, word) != getattr(plain, word)):
            yield Issue(f"{place}.{word}", "is for steps that call a tool", "Remove it, or name a `tool`.")
    if step.stand_in:
        later = [one for one in ids[at + 1 :] if one != step.id]
        if step.stand_in not in later:
            hint = did_you_mean(step.stand_in, [FAIL, SKIP, *later])
            fix = f"{hint}Write `fail`, `skip`, or the id of a step that is written after this one."
            yield Issue(f"{place}.on_error", f"{step.stand_in!r:.80} is no later step", fix)


def _order_faults(place: str, wanted: str, ids: Sequence[str], before: Sequence[str]) -> Iterator[Issue]:
    if wanted not in ids:
        yield Issue(place, f"no step has the id {wanted!r:.80}", f"{did_you_mean(wanted, ids)}Steps: {', '.join(ids)}.")
    elif wanted not in before:
        reason = "is the step itself" if wanted == ids[len(before)] else f"the step `{wanted}` comes later"
        yield Issue(place, reason, "Steps use what stands before them: move it up, or remove this.")


def _name_faults(
    place: str, name: str, declared: JsonObject, ids: Sequence[str], before: Sequence[str], extra: Sequence[str]
) -> Iterator[Issue]:
    head, _, rest = name.partition(".")
    if head == "steps":
        step, _, word = rest.partition(".")
        yield from _order_faults(place, step, ids, before)
        if word.partition(".")[0] not in _OF_STEP:
            fix = f"Write `steps.{step}.result`, or `.status` or `.error.message`."
            yield Issue(place, f"`{name}` does not say what of the step is meant", fix)
    elif head in _RESERVED and head not in extra:
        reasons = {"answer": "a step with a `tool` and an `ask`"}
        yield Issue(place, f"`{name}` is known in {reasons.get(head, 'a step with `foreach`')} only", "Remove it.")
    elif head not in declared and head not in extra:
        fix = f"{did_you_mean(head, [*declared, *extra])}Declare a parameter `{head}`, or name a step's result."
        yield Issue(place, f"`{name}` is not a parameter", fix)


def _template_faults(place: str, template: Json) -> Iterator[Issue]:
    for name in variables(template):
        fix = "Let the item that is called name the variable: a composite has no secrets."
        yield Issue(place, f"`${{{name}}}` is a variable", fix)
    for text in _texts(template):
        if found := next((one for one in _MISTAKEN if one in text), ""):
            fix = "Write names and dots, such as `{steps.a.result.title}`; lists are walked with `foreach`."
            yield Issue(place, f"`{text[text.find(found) :][:60]}` is not understood", fix)


def _texts(template: Json) -> Iterator[str]:
    match template:
        case str():
            yield from (piece.text for piece in pieces(template) if piece.kind == "text")
        case Mapping():
            for inner in template.values():
                yield from _texts(inner)
        case _:
            for inner in as_list(template):
                yield from _texts(inner)


def _circles(composite: Composite) -> Iterator[Issue]:
    """Yield an issue for each step that waits for itself, by way of others or of the step that stands in for one."""
    steps = {step.id: step for step in composite.steps}
    waits = {
        step.id: {
            *step.depends_on(),
            *(steps[need].stand_in for need in step.depends_on() if need in steps and steps[need].stand_in != step.id),
            *(one.id for one in composite.steps if one.stand_in == step.id),
        }
        for step in composite.steps
    }
    reported: set[str] = set()
    for at, step in enumerate(composite.steps):
        circle = _circle(step.id, waits)
        if circle and not reported & {*circle}:
            reported |= {*circle}
            drawn = " → ".join((*circle, step.id))
            yield Issue(f"config.steps[{at}]", f"waits for itself: {drawn}", "Let one of them need less.")


def _circle(start: str, waits: Mapping[str, set[str]]) -> list[str]:
    """Return the steps on a way from one back to itself; none where there is no way."""
    came_from: dict[str, str] = {}
    queue = [start]
    for one in queue:
        for need in sorted(waits.get(one, ())):
            if need == start and one != start:
                way = [one]
                while way[-1] != start:
                    way.append(came_from[way[-1]])
                return way[::-1]
            if need in waits and need not in came_from and need != start:
                came_from[need] = one
                queue.append(need)
    return []


def _paths(expression: Expression) -> Iterator[tuple[str, ...]]:
    match expression:
        case DottedPath(names):
            yield names
        case Applied(operands=operands):
            for one in operands:
                yield from _paths(one)


def call_faults(manifest: Manifest, tools: Mapping[str, Manifest]) -> Iterator[Issue]:
    """Yield the parameters of steps that the items they call do not take; `tools` has the items by their names."""
    declared = as_object(manifest.parameters.get("properties"))
    for at, step in enumerate(read_composite(manifest.config).steps):
        if (called := tools.get(step.tool)) is not None:
            yield from _parameter_faults(f"config.steps[{at}].parameters", step, called, declared)


def _parameter_faults(place: str, step: CompositeStep, called: Manifest, declared: JsonObject) -> Iterator[Issue]:
    schema = called.parameters
    known, required = as_object(schema.get("properties")), [as_text(name) for name in as_list(schema.get("required"))]
    for name in required:
        if name not in step.parameters and "default" not in as_object(known.get(name)):
            yield Issue(place, f"`{step.tool}` needs `{name}`", f"Add `{name}` to the parameters of the step.")
    for name, value in step.parameters.items():
        if name not in known:
            if known and not schema.get("additionalProperties"):
                fix = f"{did_you_mean(name, known)}Its parameters: {', '.join(known)}."
                yield Issue(f"{place}.{name}", f"is not a parameter of `{step.tool}`", fix)
        elif not placeholders(value):
            yield from faults(as_object(known[name]), value, place=f"{place}.{name}")
        elif isinstance(value, str) and [piece.kind for piece in pieces(value)] == ["name"]:
            given, wanted = (as_object(one).get("type") for one in (declared.get(value[1:-1]), known[name]))
            is_text = isinstance(given, str) and isinstance(wanted, str)
            if is_text and given != wanted and {given, wanted} != _NUMBERS:
                fix = f"Declare the parameter `{value[1:-1]}` as {wanted}, or give another value."
                yield Issue(f"{place}.{name}", f"is {given}, and `{step.tool}` takes {wanted}", fix)
