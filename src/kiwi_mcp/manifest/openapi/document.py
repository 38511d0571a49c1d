"""An OpenAPI document: read within limits, its references followed within itself, its operations in order."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.json_text import read_json
from kiwi_mcp.manifest.yaml import read_yaml

MAX_BYTES = 16_000_000
MAX_NODES = 2_000_000
MAX_DEPTH = 100

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_MAX_HOPS = 16
_SPOKEN = re.compile(r"3\.[01](\.\d+)?(-\S+)?", re.ASCII)


class Inexpressible(Exception):
    """An operation that the words of an api tool cannot say."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, and the path's own words."""

    method: str
    path: str
    words: JsonObject
    shared: JsonObject

    @property
    def place(self) -> str:
        """The operation as a person writes it: `GET /pets`."""
        return f"{self.method.upper()} {self.path}"

    @property
    def name(self) -> str:
        """The operation's own name, or method and path where it has none."""
        return as_text(self.words.get("operationId")) or self.place


@dataclass(frozen=True, slots=True)
class Api:
    """A document that was read."""

    root: JsonObject

    @property
    def title(self) -> str:
        """What the document calls itself."""
        return as_text(as_object(self.root.get("info")).get("title"))

    @property
    def components(self) -> JsonObject:
        """What the document defines once, to be referred to."""
        return as_object(self.root.get("components"))

    def operations(self) -> Iterator[Operation]:
        """Give every operation, in the order of the document."""
        for path, item in as_object(self.root.get("paths")).items():
            shared = self.follow(item)
            for method in shared:
                if method in METHODS and isinstance(words := shared[method], Mapping):
                    yield Operation(method, path, words, shared)

    def follow(self, node: Json) -> JsonObject:
        """Return the object a node is or refers to within the document; empty where it leads nowhere."""
        for _ in range(_MAX_HOPS):
            found = as_object(node)
            if "$ref" not in found:
                return found
            node = self.find(found["$ref"])
        return {}

    def find(self, reference: Json) -> Json:
        """Return what a local reference names, None where it names nothing here; other documents are never read."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        here: Json = self.root
        for step in reference[2:].split("/"):
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(here, Mapping):
                here = here.get(key)
            else:
                items = as_list(here)
                here = items[int(key)] if re.fullmatch(r"\d{1,6}", key, re.ASCII) and int(key) < len(items) else None
        return here


def read_api(text: str, *, what: str) -> Api:
    """Return the OpenAPI 3.0 or 3.1 document a text holds, in JSON or YAML."""
    read = read_json if text.lstrip("\ufeff \t\r\n")[:1] in {"{", "["} else read_yaml
    root = read(text, what=what, max_bytes=MAX_BYTES, max_nodes=MAX_NODES, max_depth=MAX_DEPTH).value
    if fault := _fault(root):
        raise InvalidManifest(what, [fault])
    return Api(as_object(root))


def _fault(root: Json) -> Issue | None:
    words = as_object(root)
    if "swagger" in words:
        fix = "Convert it to OpenAPI 3 first, with a converter such as swagger2openapi."
        return Issue("swagger", f"Swagger {words['swagger']} is not read", fix)
    if "openapi" not in words:
        return Issue("openapi", "is missing: this is not an OpenAPI document", "Pass an OpenAPI 3.0 or 3.1 document.")
    if not _SPOKEN.fullmatch(str(words["openapi"])):
        return Issue("openapi", f"version {words['openapi']!s:.40} is not read", "Pass an OpenAPI 3.0 or 3.1 document.")
    if not isinstance(words.get("paths"), Mapping) or not words["paths"]:
        return Issue("paths", "is empty: there is nothing to call", "Pass a document that describes requests.")
    return None
