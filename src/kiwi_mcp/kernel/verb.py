"""What verbs are declared with: `@verb`, requests, responses, terminal views, parsing, short JSON schemas for models.

A verb is one function in `kernel/verbs/`. Its request and its response are types; each field of a request with an
`Argument` or an `Option` is also an argument of the command. The command line, the gateway's routes, the OpenAPI
document and the schemas for models are made from these declarations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import ItemType, Source
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.kernel.view import View
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.names import did_you_mean

R = TypeVar("R", bound="Request")
S = TypeVar("S", bound=msgspec.Struct)

NameText = Annotated[str, Meta(max_length=400)]
LongText = Annotated[str, Meta(max_length=4_000)]
AnyJson: TypeAlias = Any
"""A field of a response that may be any JSON value; msgspec cannot read the recursive alias `Json`."""
Access: TypeAlias = Literal["owner", "author", "anyone"]
OWNER: Access = "owner"
"""Only the owner in person; never a model."""
AUTHOR: Access = "author"
"""Callers that may change items. On a gateway, the token says so."""
ANYONE: Access = "anyone"
"""Every caller that the rules permit."""

InputKind = Literal[
    "text", "number", "flag", "path", "path_or_name", "file", "files", "json", "pairs", "commas", "variable",
    "parameters", "command",
]  # fmt: skip
"""How the text of a command line becomes a value; `surfaces/cli/inputs.py` reads each kind."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of one verb. The request gates ask it what it names."""

    takes_lists: ClassVar[bool] = False
    """Whether a list of names may stand where a field takes `a,b`."""

    def named_item(self) -> str:
        """Return the existing item that the request is about; empty if it names none."""
        return ""

    def named_kind(self) -> tuple[ItemType | None, Source | None]:
        """Return the type and the source of the item, as far as the request names them."""
        return None, None

    def remote_of(self) -> str:
        """Return the remote that the request names; empty if it names none."""
        return ""

    def brings(self) -> str:
        """Return the identity of the item that the request brings to this machine; empty if it brings none."""
        return ""


class NoArguments(Request, frozen=True, kw_only=True):
    """No arguments."""


class ProjectRequest(Request, frozen=True, kw_only=True):
    """No arguments but the project."""

    project_path: LongText | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one verb. Fields that are `UNSET` are left out of the JSON."""

    def exit_status(self) -> int:
        """Return the exit code of a command that shows this response."""
        return 0

    def may_be_followed(self) -> bool:
        """Whether a model may follow it; all else is data to a model."""
        return False

    def to_json(self) -> JsonObject:
        """Return the response as every surface sends it."""
        content: JsonObject = msgspec.to_builtins(self, enc_hook=_plain)
        return content


def _is_async(function: Callable[..., object]) -> bool:
    # As `inspect.iscoroutinefunction`, whose import would take longer than that of all verbs.
    return isinstance(function, FunctionType) and bool(function.__code__.co_flags & 0x80)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(type(value).__name__)


def filled(kind: type[S], record: object, **more: object) -> S:
    """Return a response with the fields that a record has under the same names, and with more.

    A field that may be left out is left out if it is empty.
    """
    given = {
        field.name: UNSET if field.default is UNSET and value in ("", None, ()) else value
        for field in msgspec.structs.fields(kind)
        if (value := getattr(record, field.name, UNSET)) is not UNSET
    }
    return kind(**{**given, **more})


class Verb(msgspec.Struct, frozen=True, kw_only=True):
    """One verb, as declared."""

    name: str
    group: str
    wire: tuple[str, ...]
    """What `Kernel.call` is called with: a word, and the action if that word has several."""
    request: type[Request]
    response: type
    function: Callable[[Any, Any], Awaitable[Response | Answer]]
    help: str
    access: Access | Callable[[Any], Access]
    hint: str
    records: bool | Callable[[JsonObject], bool]
    needs_receipt: bool | Callable[[JsonObject], bool]
    receipt: str
    """The action in the receipt."""
    needs_rules: bool
    writes_registry: bool
    is_local: bool
    aliases: tuple[str, ...]
    everyday: str
    asks: bool
    view: View | None
    resource: str
    """The name of the verb in policy rules."""

    @property
    def path(self) -> str:
        """The command: group and name."""
        return f"{self.group} {self.name}".strip()


DECLARED: dict[tuple[str, ...], Verb] = {}
"""The verbs of the modules that are loaded, by their wire words."""
Function = TypeVar("Function", bound=Callable[[Any, Any], Any])


def verb(
    name: str,
    *,
    access: Access | Callable[[Any], Access],
    group: str = "",
    wire: tuple[str, ...] = (),
    hint: str = "",
    records: bool | Callable[[JsonObject], bool] = True,
    needs_receipt: bool | Callable[[JsonObject], bool] = False,
    receipt: str = "",
    response: type[Response] | None = None,
    needs_rules: bool = False,
    writes_registry: bool = False,
    is_local: bool = False,
    aliases: tuple[str, ...] = (),
    everyday: str = "",
    asks: bool = False,
    shows: View | None = None,
) -> Callable[[Function], Function]:
    """Declare a verb; the docstring of the function is its help text. A function that is not async runs in a thread.

    `wire` is what callers send; without it, that is the group and the name. `access` says who may call it, or is a
    function of the request; `hint` says what a caller can do who may not. A verb leaves a receipt unless `records` is
    false; it may be a function of the payload. With `needs_receipt`, it is refused if the receipt cannot be written: it
    shares something, removes it, or makes it trusted; what takes trust away never waits for a receipt. A function that
    returns an `Answer` names its `response` here. With `needs_rules`, a named caller is refused while the rules cannot
    be read. With `writes_registry`, a caller of a gateway needs the right to write. A verb that `is_local` acts on the
    caller's own machine, and has no route. With `asks`, the owner may be asked for an approval meanwhile.
    An alias is written as it is typed: `relax --undo` has a flag, and `runs RUN` needs a further word.
    """

    def declare(function: Function) -> Function:
        hints = get_type_hints(function, localns={"VerbContext": object})
        words = wire or tuple(part for part in (group, name) if part)
        DECLARED[words] = Verb(
            name=name,
            group=group,
            wire=words,
            request=hints["request"],
            response=response or hints["return"],
            function=function
            if _is_async(function)
            else lambda request, context: asyncio.to_thread(function, request, context),
            help=" ".join((function.__doc__ or "").split()),
            access=access,
            hint=hint,
            records=records,
            needs_receipt=needs_receipt,
            receipt=receipt or " ".join(words[1:] if words[0] == "execute" else words),
            needs_rules=needs_rules,
            writes_registry=writes_registry,
            is_local=is_local,
            aliases=aliases,
            everyday=everyday,
            asks=asks,
            view=shows,
            resource=".".join(words),
        )
        return function

    return declare


def Option(  # noqa: N802 - it is written where a type is
    text: str,
    *flags: str,
    metavar: str = "",
    kind: InputKind | None = None,
    value: bool | str | None = None,
    help: str = "",  # noqa: A002 - it is written where a type is
    is_sent: bool = True,
) -> msgspec.Meta:
    """Describe a field that is typed with a flag; without `flags` it is `--` and the field's name.

    `help` is the text for people, where a model gets a shorter one or none.
    `kind` is how its text is read, if its type does not say so. `value` is what a flag without a text stands for.
    A field that is not sent is for the command line alone.
    """
    words = {"flags": [*flags], "metavar": metavar, "kind": kind, "value": value, "help": help, "is_sent": is_sent}
    return msgspec.Meta(description=text or None, extra=words)


def Argument(  # noqa: N802 - it is written where a type is
    text: str,
    metavar: str = "",
    *,
    kind: InputKind | None = None,
    help: str = "",  # noqa: A002 - it is written where a type is
    is_sent: bool = True,
) -> msgspec.Meta:
    """Describe a field that is typed without a flag, in the order of the fields."""
    words = {"metavar": metavar, "kind": kind, "help": help, "is_sent": is_sent}
    return msgspec.Meta(description=text or None, extra=words)


_OLD_WORDS = {"script": "tool"}
"""Values of `item_type` that older clients send."""
ItemKind = Literal["tool", "directive", "knowledge", "skill", "output"]
Where = Literal["project", "user"]
ITEM = "A name, name@range, server/name, namespace/name, or full identity."
OF_TYPE = "tool, directive, knowledge or skill, if several items have this name."
Item = Annotated[NameText, Argument(ITEM, "ITEM")]
DryRun = Annotated[bool, Option("Show what would happen, do nothing.")]
PlaceToWrite = Annotated[Where | None, Option("project or user.")]
Action = Literal[
    "run", "code", "sign", "create", "update", "delete", "validate", "why",
    "publish", "pull", "versions", "diff", "deprecate", "yank", "rollback", "verify", "list",
]  # fmt: skip
ACTIONS: tuple[Action, ...] = get_args(Action)


class ItemRequest(Request, frozen=True, kw_only=True):
    """The request of a verb about one item."""

    item_type: Annotated[ItemKind | None, Option(OF_TYPE, "--type", metavar="TYPE")] = None
    project_path: Annotated[LongText | None, Meta(description="Your project's absolute path")] = None
    item_id: Item

    @property
    def of_type(self) -> ItemType | None:
        """The type of item that the caller asks for; None if the name alone says which item it is."""
        return None if self.item_type == "output" else self.item_type

    def named_item(self) -> str:
        """Return the item."""
        return self.item_id

    def named_kind(self) -> tuple[ItemType | None, Source | None]:
        """Return the type of the item."""
        return self.of_type, None


class ExecuteRequest(Request, frozen=True, kw_only=True):
    """What a model sends to `execute`: an action, and what the verb of this action needs."""

    item_type: ItemKind | None = None
    project_path: Annotated[LongText | None, Meta(description="Your project's absolute path")] = None
    action: Action = "run"
    item_id: NameText | None = None
    parameters: Annotated[dict[str, AnyJson], Meta(description="The tool's, or the action's")] = {}
    dry_run: Annotated[bool, Meta(description="Show the plan")] = False
    frozen: Annotated[bool, Meta(description="Refuse changes since signing")] = False
    checkpoint: Annotated[bool, Meta(description="Save files first")] = False
    mode: Annotated[Literal["thread"] | None, Meta(description="Run a directive by an agent")] = None
    wait: Annotated[bool, Meta(description="false: only start it")] = True


class SearchRequest(Request, frozen=True, kw_only=True):
    """What to look for. It is declared here so that its schema can be shown without loading the search."""

    item_type: ItemKind | None = None
    project_path: Annotated[LongText | None, Meta(description="Your project's absolute path")] = None
    query: Annotated[LongText, Meta(description="One need: verb + object + service")]
    source: Annotated[
        Literal["local", "all", "project", "user", "builtin", "registry", "mcp"],
        Meta(description="local = project, user, mcp; all adds registry, builtin"),
    ] = "local"
    limit: Annotated[int, Meta(ge=1, le=100)] = 10
    sort_by: Literal["score", "date", "name"] = "score"
    tool_type: Annotated[NameText | None, Meta(description="Only these: a,b")] = None
    category: NameText | None = None
    tag: NameText | None = None
    server: NameText | None = None
    with_schema: Annotated[bool, Meta(description="Add the first one's schema")] = False

    takes_lists: ClassVar[bool] = True


def _joined(value: list[Json]) -> Json:
    return ",".join(map(str, value)) if all(isinstance(one, str) for one in value) else value


_EXECUTE_KEYS = frozenset(ExecuteRequest.__struct_fields__) - {"action"}
"""The keys of an `execute` request itself; every other one is a parameter of its action."""


def payload_of(verb: Verb, arguments: JsonObject) -> JsonObject:
    """Return the arguments of a verb as `Kernel.call` takes them."""
    word, *action = verb.wire
    if word != "execute" or "parameters" in verb.request.__struct_encode_fields__:
        return {**arguments, **({"action": action[0]} if action else {})}
    parameters = {name: value for name, value in arguments.items() if name not in _EXECUTE_KEYS}
    own = {name: value for name, value in arguments.items() if name in _EXECUTE_KEYS}
    return {"action": action[0], **own, **({"parameters": parameters} if parameters else {})}


def place_parameters(verb: Verb | None, payload: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    """Return a request without `parameters` to run an item, with its unknown arguments as these, and their names.

    The verb refuses those that the item does not declare, once the caller is known to see the item.
    """
    if verb is None or verb.wire != ("execute", "run"):
        return payload, ()
    own = {name: value for name, value in payload.items() if name in _EXECUTE_KEYS or name == "action"}
    strays = {name: value for name, value in payload.items() if name not in own}
    return ({**own, "parameters": strays}, tuple(strays)) if strays else (payload, ())


def arguments_of(verb: Verb, payload: JsonObject) -> JsonObject:
    """Return the arguments of a verb from what `Kernel.call` was given."""
    given = dict(payload)
    if len(verb.wire) > 1:
        given.pop("action", None)
    if verb.wire[0] != "execute":
        return given
    fields, parameters = verb.request.__struct_encode_fields__, given.get("parameters", {})
    for name in _EXECUTE_KEYS.difference(fields):
        given.pop(name, None)
    if "parameters" in fields:
        return given
    if unknown := [name for name in given if name not in _EXECUTE_KEYS]:
        raise misplaced(unknown)
    if not isinstance(parameters, Mapping):
        raise invalid("execute", [Issue("parameters", "is not a mapping", "Send an object.")])
    return {**parameters, **given}


def parse(request: type[R], name: str, arguments: JsonObject) -> R:
    """Return the request of a verb, or refuse it with every fault."""
    given = dict(arguments)
    if isinstance(word := given.get("item_type"), str):
        given["item_type"] = _OLD_WORDS.get(word, word)
    if request.takes_lists:
        given = {name: _joined(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return msgspec.convert(given, request, strict=False, dec_hook=_secret)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half of a surrogate pair is no text
        known = request.__struct_encode_fields__
        verb = name if "parameters" in known else ""
        order = {field: place for place, field in enumerate(known)}
        found = sorted(
            faults(_schema(request), _without_secrets(request, given)),
            key=lambda issue: order.get(issue.place.partition(".")[0], len(order)),
        )
        issues = [
            _unknown_argument(verb, one.place, known) if one.place in given and one.place not in known else one
            for one in found
        ]
        raise invalid(name, issues or [Issue("", str(error), "Send other arguments.")]) from error


def invalid(name: str, issues: Sequence[Issue]) -> InvalidRequest:
    """Return the refusal of a request with faults."""
    listed = "; ".join(f"{issue.place}: {issue.reason}" if issue.place else issue.reason for issue in issues)
    return InvalidRequest(
        f"Invalid request for `{name}`: {listed}.",
        suggestion=issues[0].fix,
        issues=[issue.to_json() for issue in issues],
    )


def misplaced(names: Sequence[str]) -> InvalidRequest:
    """Return the refusal of arguments that neither `execute` nor the item has."""
    return invalid("execute", [_unknown_argument("execute", name, sorted(_EXECUTE_KEYS)) for name in names])


def _unknown_argument(verb: str, name: str, known: Sequence[str]) -> Issue:
    hint, listed = did_you_mean(name, known), f"The arguments are: {', '.join(known) or 'none'}."
    fix = f"{hint}Put the tool's own arguments inside `parameters`." if verb == "execute" else hint.strip() or listed
    return Issue(name, f"unknown argument `{name[:60]}`", fix)


def _without_secrets(request: type[Request], given: JsonObject) -> JsonObject:
    """Return arguments of which each fault may be shown: a secret that is not a text is sent as false."""
    secret = {field.encode_name for field in msgspec.structs.fields(request) if field.type in {Secret, Secret | None}}
    shown = dict(given)
    for name in secret & given.keys():
        if given[name] is not None:
            shown[name] = "" if isinstance(given[name], str) else False
    return shown


def _secret(kind: type, value: object) -> Secret:
    if kind is Secret and isinstance(value, str):
        return Secret(value)
    raise TypeError(f"A {kind.__name__} is sent as a text.")


def _secret_schema(kind: type) -> dict[str, object]:
    if kind is Secret:
        return {"type": "string"}
    raise NotImplementedError(kind.__name__)


@cache
def _schema(request: type[Request]) -> JsonObject:
    return msgspec.json.schema(request, schema_hook=_secret_schema)


_SILENT = {"title", "$defs", "additionalProperties", "maxLength", "minimum", "maximum"}
"""What a schema says to programs only: the kernel checks it and tells what is wrong, so a model need not pay for it."""


def input_schema(request: type[Request]) -> JsonObject:
    """Return the schema of a request as a model needs it: self-contained, without titles and null alternatives."""
    schema, hints = _schema(request), get_type_hints(request)
    shared = as_object(schema.get("$defs"))
    own = as_object(shared[request.__name__]) if request.__name__ in shared else schema
    fields = dict(as_object(own.get("properties")))
    for name, field in fields.items():
        if choices := _choices(hints[name]):  # in the order of their declaration; msgspec sorts them
            rest = {word: value for word, value in as_object(field).items() if word not in {"enum", "anyOf"}}
            fields[name] = {"enum": [*choices], "type": "string", **rest}
    short = dict(_shorten_object({**own, "properties": fields, "$defs": shared}, shared))
    short.pop("description", None)  # the tool's own description says it better
    return short


def _choices(hint: object) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((found for part in get_args(hint) if (found := _choices(part))), ())


def _shorten(node: Json, shared: JsonObject) -> Json:
    if isinstance(node, Mapping):
        return _shorten_object(node, shared)
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_shorten(part, shared) for part in node]
    return node


def _shorten_object(node: JsonObject, shared: JsonObject) -> JsonObject:
    if reference := as_text(node.get("$ref")):
        named = as_object(shared[reference.rpartition("/")[2]])
        return _shorten_object({**named, **{word: value for word, value in node.items() if word != "$ref"}}, shared)
    plain = dict(node)
    choices = [as_object(choice) for choice in as_list(node.get("anyOf"))]
    real = [choice for choice in choices if choice.get("type") != "null"]
    if len(real) == 1 and len(choices) > 1:  # `X or null`: an absent parameter says the same as null
        plain |= {**real[0], "anyOf": None}
    if all(isinstance(choice, str) for choice in as_list(plain.get("enum"))) and "enum" in plain:
        plain["type"] = "string"
    # A parameter left out is understood as empty, zero or false, so only other defaults are worth a word.
    return {
        word: _part(word, value, shared)
        for word, value in sorted(plain.items())
        if word not in _SILENT and (value or word not in {"default", "anyOf", "required"})
    }


def _part(word: str, value: Json, shared: JsonObject) -> Json:
    if word == "properties":  # its members are names of the request's own, which may be called `title`
        return {name: _shorten(part, shared) for name, part in as_object(value).items()}
    return value if word in {"default", "enum", "const"} else _shorten(value, shared)


class Answer(msgspec.Struct, frozen=True):
    """One answer: the object that surfaces show, and whether it is a failure."""

    content: JsonObject
    is_error: bool = False
    exit_code: int = 0
    passed: JsonObject | None = None
    """What an MCP server answered, word for word, where the call was one to it."""
    is_instructions: bool = False
    """Whether a model may follow it, by the item that it comes from; all else is data to a model."""
    http_status: int = 200
    response: Response | None = None
    """The typed response, for views; None for a refusal."""
    error: KiwiError | None = None
    """Why it was refused."""


def refusal(error: KiwiError, *, item_type: str, about: JsonObject) -> Answer:
    """Return the answer to a call that was refused before anything ran."""
    content = {**error.to_response(item_type), **about}
    return Answer(content, is_error=True, exit_code=error.exit_code, http_status=error.http_status, error=error)


def answer_of(response: Response) -> Answer:
    """Return a response as surfaces show it."""
    return Answer(
        response.to_json(),
        exit_code=response.exit_status(),
        is_instructions=response.may_be_followed(),
        response=response,
    )
