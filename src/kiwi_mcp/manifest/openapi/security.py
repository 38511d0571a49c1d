"""How a request proves who sends it: a document's security schemes as the `auth` word and variables."""

from __future__ import annotations

from dataclasses import dataclass, field

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.openapi.document import Api, Inexpressible, Operation
from kiwi_mcp.manifest.openapi.slots import Slot, is_header, is_wire_name
from kiwi_mcp.manifest.openapi.words import snake, variable_name


@dataclass(frozen=True, slots=True)
class Credentials:
    """The `auth` word of a tool, and what headers and query carry beside it; values are `${NAME}`."""

    auth: JsonObject = field(default_factory=dict)
    headers: JsonObject = field(default_factory=dict)
    query: JsonObject = field(default_factory=dict)

    def carries(self, slot: Slot) -> bool:
        """Whether a slot would be filled by the credentials already."""
        is_auth = slot.where == self.auth.get("in") and slot.wire.lower() == as_text(self.auth.get("name")).lower()
        taken = {"header": self.headers, "query": self.query}.get(slot.where, {})
        return is_auth or slot.wire.lower() in {name.lower() for name in taken}


def credentials_of(api: Api, operation: Operation, prefix: str, auth: JsonObject) -> Credentials:
    """Return the first way to authenticate that the words of an api tool can say; `auth` where none is asked for."""
    ways = as_list(operation.words.get("security", api.root.get("security")))
    if not ways:
        return Credentials(auth)
    for way in ways:
        if (found := _expressed(api, list(as_object(way)), variable_name(prefix))) is not None:
            return found
    names = sorted({name for way in ways for name in as_object(way)})
    raise Inexpressible(
        f"it asks for {', '.join(names)[:200]}, which an api tool cannot give", "Write a script for this operation."
    )


def _expressed(api: Api, names: list[str], prefix: str) -> Credentials | None:
    """Return the credentials for schemes that are all asked for at once."""
    schemes = as_object(api.components.get("securitySchemes"))
    auth: JsonObject = {}
    headers: dict[str, Json] = {}
    query: dict[str, Json] = {}
    for name in names:
        scheme = api.follow(schemes.get(name))
        word = _auth(scheme, f"{prefix}_{_key_suffix(api, name)}", prefix)
        if word and not auth and (len(names) == 1 or word["type"] != "api_key"):
            auth = word
        elif not word or word["type"] != "api_key":
            return None
        else:
            (query if word["in"] == "query" else headers)[as_text(word["name"])] = word["key"]
    return Credentials(auth, headers, query)


def _auth(scheme: JsonObject, key: str, prefix: str) -> JsonObject:
    """Return the `auth` word of one scheme; empty where there is none for it."""
    match scheme.get("type"), as_text(scheme.get("scheme")).lower(), scheme.get("in"):
        case ("http", "bearer", _) | ("oauth2" | "openIdConnect", _, _):
            return {"type": "bearer", "token": f"${{{prefix}_TOKEN}}"}
        case ("http", "basic", _):
            return {"type": "basic", "username": f"${{{prefix}_USERNAME}}", "password": f"${{{prefix}_PASSWORD}}"}
        case ("apiKey", _, "header" | "query" as place):
            name = as_text(scheme.get("name"))
            is_name = is_header(name) if place == "header" else is_wire_name(name)
            return {"type": "api_key", "key": f"${{{key}}}", "name": name, "in": place} if is_name else {}
        case ("apiKey", _, "cookie") if is_header(name := as_text(scheme.get("name"))):
            return {"type": "api_key", "key": f"{name}=${{{key}}}", "name": "Cookie", "in": "header"}
        case _:
            return {}


def _key_suffix(api: Api, name: str) -> str:
    """`API_KEY` for the only key of a document, the scheme's name where there are several."""
    schemes = as_object(api.components.get("securitySchemes"))
    keys = [each for each in schemes if api.follow(schemes[each]).get("type") == "apiKey"]
    return snake(name).upper() if len(keys) > 1 and snake(name) else "API_KEY"
