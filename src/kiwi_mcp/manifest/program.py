"""A directive as a program: its text with the inputs filled in, its context, rights, limits, hooks and outputs.

`directive_program` serves `execute` on a directive and threads alike; `thread_program` adds what a thread item says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Literal, TypeAlias, cast

from msgspec import Struct, field
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.errors import InvalidArguments, InvalidManifest
from kiwi_mcp.domain.grants import Grant, empty_grant
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import CHECKPOINT_MODES, Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.directive import limits_in, read_directive
from kiwi_mcp.manifest.hooks import Hook, hooks_in
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.legacy import xml_of
from kiwi_mcp.manifest.markdown import body
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.parameters import TYPES, accept
from kiwi_mcp.manifest.permissions import delegate_of, grant_of, said_by, with_skills

MAX_ANCESTORS = 16
_INPUT = lazy_pattern(r"\{input:([A-Za-z0-9_.-]+)(\?|[:|][^{}]*)?\}")
_ID = lazy_pattern(r"[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*")
_OUTPUT = lazy_pattern(r"^\s*[-*]?\s*`?([A-Za-z_][A-Za-z0-9_]*)`?\s*:\s*(.+?)\s*$", re.MULTILINE)
_CHOICE = lazy_pattern(r"\"([^\"]*)\"|'([^']*)'")
_CONTEXT = ("system", "before", "after")
_STEP_KEYS = ("name", "description", "action")
_INSTRUCTIONS = (
    "Follow `text` step by step with your own tools, within `permissions` and `limits`, and answer with `outputs`."
)

CheckpointMode: TypeAlias = Literal["auto", "explicit", "disabled"]


class TextItem(Struct, frozen=True):
    """A directive or an entry of knowledge: its manifest, and the text of its Markdown file."""

    manifest: Manifest
    text: str
    identity: str = ""

    @property
    def config(self) -> JsonObject:
        """What the item says of itself: the manifest, and below it the XML of its text, without its permissions."""
        if "process" in self.manifest.config or xml_of(self.text) is None:
            return self.manifest.config
        config = as_object(read_directive(self.text, what=self.manifest.tool_id)["config"])
        return {**{word: value for word, value in config.items() if word != "permissions"}, **self.manifest.config}


Load: TypeAlias = Callable[[str, str, str], TextItem | None]
"""Returns the item that is meant by a name, an item type and the identity of the item that names it, or None."""


class DirectiveLimits(Struct, frozen=True):
    """The limits that a directive or thread sets; None where it sets none."""

    turns: int | None = None
    tokens: int | None = None
    spend: float | None = None
    spend_currency: str = "USD"
    duration: float | None = None
    """Seconds."""
    spawns: int | None = None
    depth: int | None = None
    tool_calls: int | None = None
    children: int | None = None
    threads: int | None = None
    answer_seconds: int | None = None
    on_exceeded: Literal["stop", "warn", "escalate"] = "stop"


class ModelPreference(Struct, frozen=True):
    """The model that a directive asks for; an explicit `id` has priority over a tier."""

    tier: str = ""
    id: str = ""
    fallback: str = ""


class McpUse(Struct, frozen=True):
    """An MCP server that a directive uses."""

    name: str
    is_required: bool = False
    tools: tuple[str, ...] = ()


class DirectiveProgram(Struct, frozen=True):
    """All that a model, or a thread around it, needs to follow a directive."""

    name: str
    version: str
    description: str
    text: str
    """The program as Markdown, with the inputs filled in."""
    system: str
    before: str
    after: str
    """The context: for the system prompt, and before and after the program."""
    inputs: JsonObject
    input_schema: JsonObject
    outputs: JsonObject
    """The outputs as they are declared; `return_schema` makes a schema of them."""
    permissions: tuple[Grant, ...]
    """What the directive may use: all of these grants must allow it. Never empty."""
    delegates: tuple[Grant, ...]
    """What it may pass on to a directive that it spawns, though perhaps not use itself."""
    limits: DirectiveLimits = DirectiveLimits()
    model: ModelPreference = ModelPreference()
    hooks: tuple[Hook, ...] = ()
    mcps: tuple[McpUse, ...] = ()
    skills: tuple[str, ...] = ()
    """The skills that it uses; it may read them."""
    git_checkpoint: CheckpointMode = "explicit"
    notices: tuple[str, ...] = ()
    """What its owner should know: knowledge of its context that is not here."""
    written: JsonObject = field(default_factory=dict)
    """The program as it was written: inputs, steps, context, outputs, criteria."""

    def to_json(self) -> JsonObject:
        """Return the program for the model of a caller."""
        limits = {word: value for word, value in asdict(self.limits).items() if value is not None}
        model = {word: value for word, value in asdict(self.model).items() if value}
        return {
            **self.written,
            "text": self.text,
            "instructions": _INSTRUCTIONS,
            "provided_inputs": self.inputs,
            "input_schema": self.input_schema,
            **({"limits": limits} if limits.keys() - {"spend_currency", "on_exceeded"} else {}),
            **({"model": model} if model else {}),
            "git_checkpoint": self.git_checkpoint,
            **({"notices": list(self.notices)} if self.notices else {}),
        }


def directive_program(item: TextItem, inputs: JsonObject, load: Load) -> DirectiveProgram:
    """Return a directive as a program for some inputs; refuse inputs that it does not take, or lacks."""
    lineage = ancestors(item, load)  # the item itself last
    manifest, configs = item.manifest, [one.config for one in lineage]
    schema = merged_inputs([one.manifest.parameters for one in lineage])
    filled = checked_inputs(manifest.tool_id, schema, inputs)
    written = _written(item, configs[-1], schema)
    notices: list[str] = []
    system, before, after = ("\n\n".join(_context(word, lineage, load, notices)) for word in _CONTEXT)
    rights = [(one.manifest.tool_id, config.get("permissions")) for one, config in zip(lineage, configs, strict=True)]
    able = [(name, granted) for name, granted in rights if granted]
    skills = tuple(dict.fromkeys(as_text(name) for config in configs for name in as_list(config.get("skills"))))
    listed = "\n".join(_skill_lines(skills, lineage, load, notices))
    nothing = (with_skills(empty_grant(manifest.tool_id), skills),)
    checkpoint = _nearest("git_checkpoint", configs)
    mode = as_text(as_object(checkpoint).get("mode")) or as_text(checkpoint)
    return DirectiveProgram(
        name=manifest.tool_id,
        version=manifest.version,
        description=manifest.description,
        text=_text(item, configs[-1], written, filled),
        system=fill(system, filled),
        before=fill(before, filled),
        after="\n\n".join(filter(None, (fill(after, filled), listed))),
        inputs=filled,
        input_schema=schema,
        outputs=as_object(_nearest("outputs", configs)) or manifest.outputs,
        permissions=tuple(with_skills(grant_of(granted, name), skills) for name, granted in able) or nothing,
        delegates=tuple(with_skills(delegate_of(granted, name), skills) for name, granted in able) or nothing,
        limits=reduce(_with_limits, configs, DirectiveLimits()),
        model=_model(_nearest("model", configs), as_text(_nearest("model_tier", configs))),
        hooks=tuple(hook for config in reversed(configs) for hook in hooks_in(config.get("hooks"))),
        mcps=tuple(use for config in configs for use in mcps_in(config.get("mcps"))),
        skills=skills,
        git_checkpoint=cast("CheckpointMode", mode) if mode in CHECKPOINT_MODES else "explicit",
        notices=tuple(notices),
        written=written,
    )


def thread_program(item: TextItem, inputs: JsonObject, load: Load) -> DirectiveProgram:
    """Return the program of a thread item: that of its directive, with the model, limits and rights the thread sets."""
    thread, config = item.manifest, item.manifest.config
    directive = load(as_text(config.get("directive")), "directive", item.identity)
    if directive is None:
        raise InvalidManifest(thread.tool_id, [_absent("config.directive", as_text(config.get("directive")))])
    program = directive_program(directive, inputs, load)
    model = _model(config.get("model"), as_text(config.get("model_tier")))
    grants, delegates = program.permissions, program.delegates
    if config.get("inherit_permissions") is False:
        grants = delegates = (empty_grant(thread.tool_id),)
    elif config.get("permissions"):
        grants = (*grants, grant_of(config["permissions"], thread.tool_id))
        delegates = (*delegates, delegate_of(config["permissions"], thread.tool_id))
    return replace(
        program,
        permissions=grants,
        delegates=delegates,
        limits=_with_limits(program.limits, config),
        model=ModelPreference(
            model.tier or program.model.tier,
            model.id or ("" if model.tier else program.model.id),  # a tier of its own replaces the directive's model
            model.fallback or program.model.fallback,
        ),
    )


def ancestors(item: TextItem, load: Load) -> tuple[TextItem, ...]:
    """Return a directive with all that it extends, the root first; refuse a cycle and an absent one."""
    found = [item]
    while parent := as_text(found[0].config.get("extends")):
        above = load(parent, "directive", found[0].identity)
        names = [one.manifest.tool_id for one in found]
        if above is None:
            raise InvalidManifest(item.manifest.tool_id, [_absent("config.extends", parent)])
        if above.manifest.tool_id in names or len(found) > MAX_ANCESTORS:
            drawn = " → ".join((*reversed(names), above.manifest.tool_id))
            issue = Issue("config.extends", f"leads back to itself: {drawn}", "Let one of them extend nothing.")
            raise InvalidManifest(item.manifest.tool_id, [issue])
        found.insert(0, above)
    return tuple(found)


def merged_inputs(schemas: Sequence[JsonObject]) -> JsonObject:
    """Return the inputs of a directive and all that it extends: by name, the leaf's own last."""
    *above, own = schemas
    if not any(as_object(schema.get("properties")) for schema in above):
        return own
    properties: dict[str, Json] = {}
    required: dict[str, bool] = {}
    for schema in schemas:
        declared = as_object(schema.get("properties"))
        properties |= declared
        required |= {name: name in as_list(schema.get("required")) for name in declared}
    return {**own, "properties": properties, "required": [name for name, is_needed in required.items() if is_needed]}


def checked_inputs(tool_id: str, schema: JsonObject, inputs: JsonObject) -> JsonObject:
    """Return inputs with defaults, or refuse wrong ones; a directive that declares no inputs takes any."""
    if not as_object(schema.get("properties")):
        return inputs
    filled = accept(tool_id, schema, inputs)
    required = {name: filled.get(name) for name in map(as_text, as_list(schema.get("required")))}
    blank = [name for name, value in required.items() if value is None or not text_of(value).strip()]
    if blank:
        reason = "is required, and blank"
        raise InvalidArguments(tool_id, [Issue(name, reason, "Send a value for it.") for name in blank])
    return filled


def fill(text: str, inputs: JsonObject) -> str:
    """Return a text with `{input:name}`, `{input:name:default}` and `{input:name?}` replaced, in one pass."""

    def value(found: re.Match[str]) -> str:
        if found[1] in inputs:
            return text_of(inputs[found[1]])
        return found[0] if found[2] is None else found[2][1:]

    return _INPUT.sub(value, text)


def undeclared(text: str, schema: JsonObject) -> tuple[str, ...]:
    """Return the names in `{input:name}` that are no inputs and have no default."""
    declared = as_object(schema.get("properties"))
    found = (one[1] for one in _INPUT.finditer(text) if one[2] is None and one[1] not in declared)
    return tuple(dict.fromkeys(found)) if declared else ()


def return_schema(outputs: JsonObject) -> JsonObject:
    """Return the schema of the arguments of `return`, without alternatives at the top: some model APIs refuse them."""
    branches = _branches(outputs)
    properties = {name: one for branch in branches for name, one in as_object(branch.get("properties")).items()}
    required = [name for name in properties if all(name in as_list(one.get("required")) for one in branches)]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def return_faults(outputs: JsonObject, value: Json) -> tuple[Issue, ...]:
    """Return why a value is not what a directive declares to return; nothing where it fits one of the outcomes."""
    branches = _branches(outputs)
    every = {name for branch in branches for name in as_object(branch.get("properties"))}
    found: list[tuple[Issue, ...]] = []
    for branch in branches:
        # What only another outcome has would make it unclear which of them is meant.
        foreign = every & {*as_object(value)} - {*as_object(branch.get("properties"))}
        fix = "Return the outputs of one outcome: success or failure."
        found.append((*faults(branch, value), *(Issue(name, "belongs to another outcome", fix) for name in foreign)))
    return min(found, key=len)


def _branches(outputs: JsonObject) -> list[JsonObject]:
    """Return a schema for each outcome that outputs declare."""
    if outputs.get("type") == "object" or "properties" in outputs:
        return [outputs]
    properties: dict[str, JsonObject] = {}
    needed: list[str] = []
    for one in map(as_object, as_list(outputs.get("fields"))):
        name, kind = as_text(one.get("name")), TYPES.get(as_text(one.get("type")).lower(), "")
        words = {"type": kind, "description": as_text(one.get("description"))}
        properties[name] = {word: value for word, value in words.items() if value}
        needed += [name] if as_text(one.get("required")).lower() == "true" else []
    if properties:
        return [{"type": "object", "properties": properties, "required": needed}]
    listed = [_OUTPUT.findall(as_text(outputs.get(word))) for word in ("success", "failure", "text")]
    named = [{name: _output_schema(kind) for name, kind in one} for one in listed if one]
    return [
        {"type": "object", "properties": each, "required": [*each]}
        for each in named or [{"result": {"description": "The result."}}]
    ]


def _output_schema(kind: str) -> JsonObject:
    """Return the schema of an output as old directives write it: a type, or the choice of texts."""
    choices = [first or second for first, second in _CHOICE.findall(kind)]
    word, _, about = kind.partition(" ")
    if choices:
        return {"enum": choices}
    if known := TYPES.get(word.strip("`").lower(), ""):
        return {"type": known, **({"description": about.strip(" -()")} if about.strip() else {})}
    return {"description": kind}


def mcps_in(written: Json) -> tuple[McpUse, ...]:
    """Return the MCP servers that a directive names."""
    found = [{"name": one} if isinstance(one, str) else as_object(one) for one in as_list(written)]
    return tuple(
        McpUse(as_text(one["name"]), one.get("required") is True, tuple(map(as_text, as_list(one.get("tools")))))
        for one in found
        if one.get("name")
    )


def context_ids(config: JsonObject) -> tuple[str, ...]:
    """Return the knowledge that the context of a directive names."""
    context = as_object(config.get("context"))
    entries = (entry for word in _CONTEXT for entry in _entries(context.get(word)))
    return tuple(entry for entry in entries if _ID.fullmatch(entry))


def folder_issues(manifest: Manifest, text: str, file: str) -> Iterator[Issue]:
    """Yield where the XML of a directive in a folder says other than its manifest, which counts."""
    if xml_of(text) is None:
        return
    try:
        said = read_directive(text, what=file)
    except InvalidManifest as error:
        yield from (replace(issue, place=f"{file}:{issue.place}".rstrip(":")) for issue in error.issues)
        return
    own = _comparable(manifest.tool_id, manifest.version, manifest.parameters)
    written = {as_text(as_object(one).get("name")): as_object(one) for one in as_list(said.get("parameters"))}
    needed = [name for name, one in written.items() if one.get("required") is True]
    schema: JsonObject = {"properties": written, "required": needed}
    other = _comparable(as_text(said["tool_id"]), as_text(said["version"]), schema if written else manifest.parameters)
    for word, value in own.items():
        if other[word] != value:
            reason = f"says {compact(other[word])}, and the manifest says {compact(value)}"
            yield Issue(f"{file}:{word}", reason, "Write the same in both; the manifest counts.")
    permissions, name = as_object(said["config"]).get("permissions"), manifest.tool_id
    if permissions and grant_of(permissions, name) != grant_of(manifest.config.get("permissions"), name):
        fix = "Write the same in both; the manifest counts."
        yield Issue(f"{file}:permissions", "grants other than the manifest does", fix)


def input_issues(thread: Manifest, directive: Manifest) -> Iterator[Issue]:
    """Yield the parameters of a thread that its directive does not take, and the inputs that it lacks."""
    given, taken = (as_object(one.parameters.get("properties")) for one in (thread, directive))
    for name in given if taken else ():
        if name not in taken:
            fix = f"{did_you_mean(name, taken)}Its inputs are: {', '.join(taken)}."
            yield Issue(f"parameters.{name}", f"is no input of the directive {directive.tool_id!r}", fix)
    for name in map(as_text, as_list(directive.parameters.get("required"))):
        if name not in given:
            fix = f"Add a parameter `{name}`."
            yield Issue("parameters", f"the directive {directive.tool_id!r} needs the input `{name}`", fix)


def _comparable(name: str, version: str, schema: JsonObject) -> JsonObject:
    inputs = {name: as_object(one).get("type") for name, one in as_object(schema.get("properties")).items()}
    required = sorted(as_text(name) for name in as_list(schema.get("required")))
    return {"name": name, "version": version, "inputs": inputs, "required inputs": required}


def program_text(program: JsonObject) -> str:
    """Return the program that a directive is, as Markdown."""
    sections = (
        *_section("Context", _facts(program.get("context"))),
        *_section("Inputs", _inputs(program)),
        *_section("Steps", _steps(program)),
        *_section("Outputs", _facts(program.get("outputs"))),
        *_section("Done when", (f"- {text_of(one)}" for one in as_list(program.get("success_criteria")))),
    )
    head = (f"# {as_text(program.get('name'))}", "", as_text(program.get("description")))
    return "\n".join((*head, *sections)).strip() + "\n"


def _section(title: str, lines: Iterator[str]) -> list[str]:
    found = list(lines)
    return ["", f"## {title}", "", *found] if found else []


def _inputs(program: JsonObject) -> Iterator[str]:
    given = as_object(program.get("provided_inputs"))
    declared = {as_text(one.get("name")): one for one in map(as_object, as_list(program.get("inputs")))}
    for name in dict.fromkeys((*declared, *given)):
        value = text_of(given[name]) if name in given else "(not given)"
        about = as_text(declared.get(name, {}).get("description"))
        yield f"- {name}: {value}{f' ({about})' if about else ''}"


def _steps(program: JsonObject) -> Iterator[str]:
    for number, step in enumerate(map(as_object, as_list(program.get("process"))), 1):
        name, description, action = (as_text(step.get(word)).strip() for word in _STEP_KEYS)
        yield f"{number}. {': '.join(filter(None, (name, description)))}"
        yield from (f"   {line}" for line in action.splitlines())
        yield from (f"   {word}: {text_of(value)}" for word, value in step.items() if word not in _STEP_KEYS)
    yield from as_text(program.get("process_text")).splitlines()


def _facts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    yield from (f"- {word}: {text_of(inner)}" for word, inner in as_object(value).items())


def _written(item: TextItem, config: JsonObject, schema: JsonObject) -> JsonObject:
    """Return the program as it was written, for a reader."""
    required = as_list(schema.get("required"))
    inputs: list[Json] = [
        {"name": name, **as_object(one), "required": name in required}
        for name, one in as_object(schema.get("properties")).items()
    ]
    context = as_object(config.get("context"))
    kept: dict[str, Json] = {
        "process_text": config.get("text"),
        "context": {word: value for word, value in context.items() if word not in (*_CONTEXT, "suppress")},
        "outputs": config.get("outputs"),
        "success_criteria": config.get("success_criteria"),
    }
    return {
        "name": item.manifest.tool_id,
        "description": item.manifest.description,
        "version": item.manifest.version,
        "inputs": inputs,
        "process": config.get("process", []),
        "permissions": said_by(config.get("permissions"), item.manifest.tool_id).to_json(),
        **{word: value for word, value in kept.items() if value},
    }


def _text(item: TextItem, config: JsonObject, written: JsonObject, inputs: JsonObject) -> str:
    """Return the program as Markdown. Each part that an author wrote is filled by itself, so no value is filled."""
    if "process" not in config:  # plain Markdown is a program as it stands
        given = _section("Inputs", _inputs({**written, "provided_inputs": inputs}))
        return "\n".join([fill(body(item.text), inputs), *given]).strip() + "\n"
    filled = {word: value if word == "inputs" else _filled(value, inputs) for word, value in written.items()}
    return program_text({**filled, "provided_inputs": inputs})


def _filled(value: Json, inputs: JsonObject) -> Json:
    match value:
        case str():
            return fill(value, inputs)
        case Mapping():
            return {word: _filled(inner, inputs) for word, inner in value.items()}
        case list() | tuple():
            return [_filled(inner, inputs) for inner in value]
        case _:
            return value


def _context(word: str, lineage: Sequence[TextItem], load: Load, notices: list[str]) -> Iterator[str]:
    """Yield the texts of one part of the context, the root's first, each once, without what is suppressed."""
    contexts = [(as_object(one.config.get("context")), one) for one in lineage]
    done = {entry for context, _ in contexts for entry in _entries(context.get("suppress"))}
    for entry, one in ((entry, one) for context, one in contexts for entry in _entries(context.get(word))):
        if entry in done:
            continue
        done.add(entry)
        if not _ID.fullmatch(entry):
            yield entry
        elif found := load(entry, "knowledge", one.identity):
            yield body(found.text)
        else:
            notices.append(f"`{entry}`, which belongs to its context ({word}), is not in any catalog.")


def _skill_lines(names: Sequence[str], lineage: Sequence[TextItem], load: Load, notices: list[str]) -> Iterator[str]:
    """Yield the skills of a directive with what each is for; one that is not here is a notice."""
    if names:
        yield "Skills for this task, which the tool `skill` loads:"
    for name in names:
        found = next((item for one in lineage if (item := load(name, "skill", one.identity))), None)
        if found:
            yield f"- {found.manifest.tool_id}: {found.manifest.description}"
        else:
            notices.append(f"The skill `{name}` is not in any catalog.")
            yield f"- {name}: not here"


def _entries(value: Json) -> Sequence[str]:
    """Return the entries of a part of a context, which is one text, a list, or an element with text."""
    listed = [value] if isinstance(value, str) else as_list(value) or ([value] if value else [])
    texts = (one if isinstance(one, str) else as_text(as_object(one).get("_text")) for one in listed)
    return [text.strip() for text in texts if text.strip()]


def _nearest(word: str, configs: Sequence[JsonObject]) -> Json:
    return next((config[word] for config in reversed(configs) if config.get(word)), None)


def _with_limits(limits: DirectiveLimits, config: JsonObject) -> DirectiveLimits:
    """Return limits with those of one item in their place; `max_tokens` and `timeout` are limits too."""
    others = {"tokens": config.get("max_tokens"), "duration": config.get("timeout")}
    own = {**{word: value for word, value in others.items() if value is not None}, **limits_in(config.get("limits"))}
    return replace(limits, **own)


def _model(written: Json, tier: str) -> ModelPreference:
    words = as_object(written)
    named = written if isinstance(written, str) else as_text(words.get("id"))
    return ModelPreference(tier or as_text(words.get("tier")), named, as_text(words.get("fallback")))


def _absent(place: str, ref: str) -> Issue:
    return Issue(place, f"{ref!r:.140} is not in any catalog", f"Create `{ref:.140}`, or name one that exists.")
