"""What a request takes besides its body: path, query and header parameters, as slots with a name each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from urllib.parse import quote

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.openapi.document import Api, Inexpressible, Operation
from kiwi_mcp.manifest.openapi.schemas import Schemas, described, types_of
from kiwi_mcp.manifest.openapi.servers import path_names
from kiwi_mcp.manifest.openapi.words import parameter_name, unused

_WIRE = re.compile(r"[^\x00-\x1f\x7f{}]{1,200}")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}", re.ASCII)
# OpenAPI says the first three are described elsewhere; the rest belong to the connection.
_NOT_SETTABLE = {
    "accept", "content-type", "authorization", "cookie", "host", "content-length", "connection", "transfer-encoding",
    "te", "trailer", "upgrade", "expect",
}  # fmt: skip
_PLACES = ("path", "query", "header", "cookie")
_SEPARATORS = {"spaceDelimited": "spaces", "pipeDelimited": "`|`"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One value of a request: where it goes, under which name of the wire, and what it may be."""

    where: str
    wire: str
    schema: JsonObject
    is_required: bool
    style: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """The slot as a template writes it."""
        return f"{{{self.name}}}"

    @property
    def text_in_path(self) -> str:
        """The slot as the path of a URL writes it."""
        match self.style:
            case "label":
                return f".{self.text}"
            case "matrix":
                return f";{quote(self.wire, safe='')}={self.text}"
            case _:
                return self.text


def named(slots: Iterable[Slot]) -> tuple[Slot, ...]:
    """Return the slots with names no two of which are alike; the earlier keeps the plain one."""
    taken: dict[str, Slot] = {}
    for slot in slots:
        plain = parameter_name(slot.wire)
        name = unused(plain if plain not in taken else f"{slot.where}_{plain}", taken)
        taken[name] = replace(slot, name=name)
    return tuple(taken.values())


def is_header(name: str) -> bool:
    """Whether a text can be the name of a header that a tool may send."""
    return _TOKEN.fullmatch(name) is not None and name.lower() not in _NOT_SETTABLE - {"authorization"}


def is_wire_name(name: str) -> bool:
    """Whether a text can stand as a name in a template: it has no braces, so it means only itself."""
    return _WIRE.fullmatch(name) is not None


def slots_of(api: Api, operation: Operation, schemas: Schemas) -> list[Slot]:
    """Return the parameters of an operation, those of the path first."""
    found = [slot for parameter in _declared(api, operation) for slot in _slots(parameter, operation, schemas)]
    in_path = {slot.wire: slot for slot in found if slot.where == "path"}
    places = path_names(operation.path)
    # A place in the path that nothing declares must be filled all the same.
    path = [in_path.get(wire, Slot("path", wire, {"type": "string"}, is_required=True)) for wire in places]
    return [*path, *(slot for where in ("query", "header") for slot in found if slot.where == where)]


def _declared(api: Api, operation: Operation) -> Iterable[JsonObject]:
    listed = (*as_list(operation.shared.get("parameters")), *as_list(operation.words.get("parameters")))
    found: dict[tuple[str, str], JsonObject] = {}
    for node in listed:
        parameter = api.follow(node)
        key = (as_text(parameter.get("in")), as_text(parameter.get("name")))
        if key[0] not in _PLACES or not key[1]:
            raise Inexpressible("a parameter cannot be read", "Give each parameter `name` and `in`, in this document.")
        found[key] = parameter
    return found.values()


def _slots(parameter: JsonObject, operation: Operation, schemas: Schemas) -> Iterator[Slot]:
    where, wire = as_text(parameter["in"]), as_text(parameter["name"])
    is_required = parameter.get("required") is True or where == "path"
    if where == "header" and wire.lower() in _NOT_SETTABLE:
        return
    if where == "cookie" or not is_wire_name(wire) or (where == "header" and not is_header(wire)):
        if is_required and (where != "path" or wire in path_names(operation.path)):
            raise Inexpressible(f"it needs the {where} parameter {wire[:80]!r}", "Write this tool by hand.")
        return
    slot = Slot(where, wire, _schema(parameter, schemas), is_required, as_text(parameter.get("style")))
    yield from _spread(slot) if _is_spread(slot, parameter) else [_spelled(slot, parameter)]


def _schema(parameter: JsonObject, schemas: Schemas) -> dict[str, Json]:
    content = as_object(parameter.get("content"))
    node = as_object(next(iter(content.values()), {})).get("schema") if content else parameter.get("schema")
    schema = schemas.expand(node)
    return described(schema, parameter.get("description"), schema.get("description"))


def _is_spread(slot: Slot, parameter: JsonObject) -> bool:
    """Whether an object goes into the query as a pair for each of its properties."""
    is_exploded = slot.style == "deepObject" or (slot.style in {"", "form"} and parameter.get("explode") is not False)
    properties = as_object(slot.schema.get("properties"))
    return slot.where == "query" and "content" not in parameter and is_exploded and bool(properties)


def _spread(slot: Slot) -> Iterator[Slot]:
    required = as_list(slot.schema.get("required")) if slot.is_required else ()
    for name, schema in as_object(slot.schema["properties"]).items():
        wire = f"{slot.wire}[{name}]" if slot.style == "deepObject" else name
        if is_wire_name(wire):
            yield Slot("query", wire, as_object(schema), name in required)


def _spelled(slot: Slot, parameter: JsonObject) -> Slot:
    """Return the slot with a schema of values that a template writes as the document asks."""
    kinds = types_of(slot.schema)
    if "content" in parameter:
        # A list would become several pairs, and text would lose its quotation marks.
        return slot if kinds and not kinds & {"string", "array"} else _as_text(slot, "Written as JSON text")
    if not kinds & {"array", "object"}:
        return slot
    is_repeated = slot.where == "query" and slot.style in {"", "form"} and parameter.get("explode") is not False
    if is_repeated and "array" in kinds:
        return slot
    between = _SEPARATORS.get(slot.style, "commas")
    return _as_text(slot, f"Several values are written as one text, with {between} between them")


def _as_text(slot: Slot, note: str) -> Slot:
    return replace(slot, schema=described({"type": "string"}, slot.schema.get("description"), note))


def template(slots: Iterable[Slot], where: str) -> Mapping[str, Json]:
    """Return the words of a template for one place: each name of the wire with the value that fills it."""
    return {slot.wire: slot.text for slot in slots if slot.where == where}
