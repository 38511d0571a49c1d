"""The body of a request: an object as a parameter for each of its properties, anything else as one parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.openapi.document import Api, Inexpressible, Operation
from kiwi_mcp.manifest.openapi.schemas import Schemas, described, types_of
from kiwi_mcp.manifest.openapi.slots import Slot, is_wire_name, template

FORM = "application/x-www-form-urlencoded"
JSON = "application/json"
_ANY_JSON = {JSON, "*/*", "application/*"}

_MAX_PROPERTIES = 100
_TEXTS = {"application/xml", "application/yaml", "application/x-yaml", "application/graphql", "application/x-ndjson"}


@dataclass(frozen=True, slots=True)
class Body:
    """How a request's body is made: its media type, its slots, and whether one slot is all of it."""

    media: str
    slots: tuple[Slot, ...]
    is_whole: bool

    @property
    def headers(self) -> JsonObject:
        """What must be said about the body; an object goes as JSON without saying."""
        media = JSON if self.media in _ANY_JSON else self.media
        return {"Content-Type": media} if self.is_whole or media != JSON else {}

    def template(self, slots: Iterable[Slot]) -> Json:
        """Return the template of the body, with the names its slots were given."""
        own = [slot for slot in slots if slot.where == "body"]
        return own[0].text if self.is_whole else template(own, "body")


def body_of(api: Api, operation: Operation, schemas: Schemas) -> Body | None:
    """Return the body of an operation, or None where it has none."""
    words = api.follow(operation.words.get("requestBody"))
    content = as_object(words.get("content"))
    if not content:
        return None
    written = _chosen(content)
    media = _plain(written)
    is_required = words.get("required") is True
    if _is_text(media):
        schema = described({"type": "string"}, words.get("description"), f"The body, as {media}")
        return Body(media, (Slot("body", "body", schema, is_required),), is_whole=True)
    # The body's properties become parameters, so what they hold is one level further down.
    schema = schemas.expand(as_object(content[written]).get("schema"), deeper=1)
    if _is_flat(schema):
        return Body(media, tuple(_flattened(schema)), is_whole=False)
    return Body(media, (_whole(media, schema, words, is_required=is_required),), is_whole=True)


def accepted(api: Api, operation: Operation) -> JsonObject:
    """Return the header that asks for the media type an operation's success has, JSON where there is a choice."""
    for status, node in as_object(operation.words.get("responses")).items():
        media = [_plain(written) for written in as_object(api.follow(node).get("content"))]
        if status.startswith("2") and media:
            best = next(filter(_is_json, media), media[0])
            return {"Accept": best} if is_wire_name(best) and "*" not in best and best.isascii() else {}
    return {}


def _chosen(content: JsonObject) -> str:
    for fits in (lambda media: media == JSON, _is_json, lambda media: media == FORM, _is_text):
        for written in content:
            if fits(_plain(written)) and is_wire_name(written):
                return written
    kinds = ", ".join(written[:60] for written in list(content)[:3])
    raise Inexpressible(f"its body is {kinds}, which an api tool cannot send", "Write a script for this operation.")


def _plain(media: str) -> str:
    return media.partition(";")[0].strip().lower()


def _is_json(media: str) -> bool:
    return media in _ANY_JSON or media == "text/json" or media.endswith("+json")


def _is_text(media: str) -> bool:
    return media.startswith("text/") or media in _TEXTS or media.endswith(("+xml", "+yaml"))


def _is_flat(schema: JsonObject) -> bool:
    properties = as_object(schema.get("properties"))
    return (
        "object" in types_of(schema)
        and "anyOf" not in schema
        and schema.get("additionalProperties", False) is False
        and 0 < len(properties) <= _MAX_PROPERTIES
        and all(is_wire_name(name) for name in properties)
    )


def _flattened(schema: JsonObject) -> Iterator[Slot]:
    required = as_list(schema.get("required"))
    for name, inner in as_object(schema.get("properties")).items():
        yield Slot("body", name, as_object(inner), name in required)


def _whole(media: str, schema: Mapping[str, Json], words: JsonObject, *, is_required: bool) -> Slot:
    kinds = types_of(schema)
    if media == FORM:
        schema = {**schema, "type": "object"}
        note = "The fields of the form"
    elif "string" in kinds or not (kinds or "anyOf" in schema):
        # The primitive sends text as it is, so that a tool can send any text.
        note = "The body; a text is sent as it is, so write it as JSON, in quotation marks"
    else:
        note = "The body"
    said = as_text(words.get("description")) or schema.get("description")
    return Slot("body", "body", described(schema, said, note), is_required)
