"""An OpenAPI document: references, server URLs and names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urljoin, urlsplit

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.names import Version, is_tool_id, unused_name
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_json, refuse
from kiwi_mcp.manifest.yaml import read_yaml

MAX_BYTES = 16_000_000
MAX_NODES = 2_000_000
MAX_DEPTH = 100

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_MAX_HOPS = 16
_SPOKEN = lazy_pattern(r"3\.[01](\.\d+)?(-\S+)?", re.ASCII)


class Unsupported(Exception):
    """An operation that the words of an api tool cannot say."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class Operation(Struct, frozen=True):
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


class Api(Struct, frozen=True):
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
        """Yield every operation, in the order of the document."""
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
        """Return the target of a local reference, None if there is none here; other documents are never read."""
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
    words = as_object(read(text, what=what, max_bytes=MAX_BYTES, max_nodes=MAX_NODES, max_depth=MAX_DEPTH).value)
    fix = "Pass an OpenAPI 3.0 or 3.1 document."
    if "swagger" in words:
        fix = "Convert it to OpenAPI 3 first, with a converter such as swagger2openapi."
        raise refuse(what, f"Swagger {words['swagger']} is not read", fix, place="swagger")
    if "openapi" not in words:
        raise refuse(what, "is missing: this is not an OpenAPI document", fix, place="openapi")
    if not _SPOKEN.fullmatch(str(words["openapi"])):
        raise refuse(what, f"version {words['openapi']!s:.40} is not read", fix, place="openapi")
    if not isinstance(words.get("paths"), Mapping) or not words["paths"]:
        fix = "Pass a document that describes requests."
        raise refuse(what, "is empty: there is nothing to call", fix, place="paths")
    return Api(words)


# Neither `$` nor braces are among them: a literal text can then make no placeholder and no variable.
_LITERAL = "/:@!&'()*+,;=%~-._?"
_HOST = lazy_pattern(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?", re.ASCII)
_ABSOLUTE = lazy_pattern(r"[A-Za-z][A-Za-z0-9+.-]*:|//", re.ASCII)
_PLACE = lazy_pattern(r"\{([^{}/]+)\}")


def server_url(api: Api, operation: Operation, base_url: str | None) -> str:
    """Return the address an operation's path is added to; `base_url`, where given, takes its place."""
    own = as_list(operation.words.get("servers")) or as_list(operation.shared.get("servers"))
    urls = [_substituted(as_object(server)) for server in own or as_list(api.root.get("servers"))]
    if base_url is not None:
        base = absolute(base_url)
        if not base:
            raise InvalidRequest(
                f"`base_url` is not an absolute http or https address: {base_url[:200]!r}.",
                suggestion="Pass an address such as `https://api.example.com/v1`.",
            )
        first = urls[0] if urls else ""
        if first in {"", "/"} or _ABSOLUTE.match(first):
            return base
        return absolute(urljoin(base_url, first)) or base
    if found := next(filter(None, map(absolute, urls)), ""):
        return found
    reason = f"no absolute server address: {', '.join(urls)[:200] or 'none is given'}"
    fix = "Pass `base_url`, the address the paths are added to, such as `https://api.example.com/v1`."
    if own:
        raise Unsupported(f"it has {reason}", fix)
    raise InvalidRequest(f"The document has {reason}.", suggestion=fix)


def absolute(url: str) -> str:
    """Return a usable absolute address without a slash at its end; empty where the text is not one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    if parts.scheme not in {"http", "https"} or not _HOST.fullmatch(parts.netloc):
        return ""
    return f"{parts.scheme}://{parts.netloc}{quote(parts.path, safe=_LITERAL)}".rstrip("/")


def path_template(path: str, names: Mapping[str, str]) -> str:
    """Return a path with each `{wire name}` replaced by its entry in `names`, and everything else as literal text."""
    literal = path.partition("#")[0]
    parts = _PLACE.split(literal if literal.startswith("/") else f"/{literal}")
    # A split on one group gives text and name in turn.
    return "".join(names[part] if at % 2 else quote(part, safe=_LITERAL) for at, part in enumerate(parts))


def path_names(path: str) -> tuple[str, ...]:
    """Return the wire names a path has places for."""
    return tuple(dict.fromkeys(_PLACE.findall(path.partition("#")[0])))


def _substituted(server: JsonObject) -> str:
    """Return the server's address with its variables at their defaults."""
    variables = as_object(server.get("variables"))
    defaults = {name: str(as_object(one).get("default", f"{{{name}}}")) for name, one in variables.items()}
    return _PLACE.sub(lambda place: defaults.get(place[1], place[0]), as_text(server.get("url")))


MAX_ID = 120
"""Shorter than a tool id may be, so that a number fits behind it."""

_MAX_NAME = 64
_TITLE_WORDS = 3
_HUMP = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BREAK = lazy_pattern(r"\s+[-+|\u2013\u2014]\s*|[:(,]")
_NUMBERS = lazy_pattern(r"v?(\d{1,9})(?:[.-](\d{1,9}))?(?:[.-](\d{1,9}))?(?!\d)", re.ASCII | re.IGNORECASE)
_FILLER = {
    "", "a", "an", "the", "of", "for", "and", "s", "api", "apis", "rest", "restful", "http", "web", "service",
    "services", "official", "public", "open", "openapi", "swagger", "spec", "specification", "definition",
    "documentation", "docs", "reference", "description", "schema", "example", "sample", "simple",
    "v1", "v2", "v3", "v4",
}  # fmt: skip
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn"}
"""The categories of characters that cannot be seen."""


def snake(text: str) -> str:
    """Return a text as an ASCII name in snake_case; empty where nothing of it is left."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", plain).lower()).strip("_")


def short_name(title: str) -> str:
    """Return the first words of a title that name something: `GitHub v3 REST API` is `github`."""
    for phrase in _BREAK.split(title):
        # An API's own spelling (`GitHub`) is one word, so humps do not count here.
        words = [word for word in snake(phrase.lower()).split("_") if word not in _FILLER and not word.isdigit()]
        if words:
            return "_".join(words[:_TITLE_WORDS])[:40].strip("_")
    return "api"


def parameter_name(wire: str) -> str:
    """Return the name a template can use for a name of the wire: `filter[name]` is `filter_name`."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", wire, re.ASCII):
        return wire[:_MAX_NAME]
    name = snake(wire)[:_MAX_NAME]
    return name if name and not name[0].isdigit() else f"p_{name}".rstrip("_")


def variable_name(prefix: str) -> str:
    """Return the beginning of the names of an API's variables: `GITHUB` of `github`."""
    name = snake(prefix).upper()
    return f"API_{name}" if name[:1].isdigit() else name


def tool_ids(prefix: str, operations: Iterable[str]) -> tuple[str, ...]:
    """Return a tool id for each operation, in order, no two alike."""
    taken: dict[str, None] = {}
    for operation in operations:
        name = snake(operation)
        is_prefixed = name == prefix or name.startswith(f"{prefix}_")
        whole = (name if is_prefixed else f"{prefix}_{name}")[:MAX_ID].strip("_")
        taken[unused_name(whole if is_tool_id(whole) else f"api_{whole}"[:MAX_ID].strip("_"), taken)] = None
    return tuple(taken)


def semantic(version: Json) -> str:
    """Return a document's version as a semantic one: `v2` is 2.0.0, a date is its three numbers."""
    text = str(version).strip()
    exact = Version.parse(text)
    if exact is None and (found := _NUMBERS.match(text)):
        major, minor, patch = (int(number or 0) for number in found.groups())
        exact = Version(major, minor, patch)
    return str(exact) if exact not in {None, Version(0, 0, 0)} else "1.0.0"


def sentence(*texts: Json, limit: int) -> str:
    """Return the first paragraphs of texts as one line, without what cannot be seen, cut at a word."""
    said: list[str] = []
    for text in texts:
        # No more than this is ever shown, and a paragraph of a megabyte is not worth splitting.
        paragraph = re.split(r"\n[ \t\r]*\n", as_text(text)[:4_000].strip(), maxsplit=1)[0]
        spaced = (" " if one in "\t\r\n" else one for one in paragraph)
        line = " ".join("".join(one for one in spaced if unicodedata.category(one) not in _INVISIBLE).split())
        if line and not any(line.rstrip(".") in earlier for earlier in said):
            said.append(line if line.endswith((".", "!", "?", ":")) else f"{line}.")
    whole = " ".join(said)
    if len(whole) <= limit:
        return whole
    return f"{whole[: limit - 1].rpartition(' ')[0] or whole[: limit - 1]}…"
