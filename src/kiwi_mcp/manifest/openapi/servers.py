"""Where an operation is: the address of its server, and its path as a template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import quote, urljoin, urlsplit

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text
from kiwi_mcp.manifest.openapi.document import Api, Inexpressible, Operation

# Neither `$` nor braces are among them: a literal text can then make no placeholder and no variable.
_LITERAL = "/:@!&'()*+,;=%~-._?"
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?", re.ASCII)
_ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:|//", re.ASCII)
_PLACE = re.compile(r"\{([^{}/]+)\}")


def server_url(api: Api, operation: Operation, base_url: str | None) -> str:
    """Return the address an operation's path is added to; `base_url`, where given, takes its place."""
    own = as_list(operation.words.get("servers")) or as_list(operation.shared.get("servers"))
    urls = [_substituted(server) for server in own or as_list(api.root.get("servers"))]
    if base_url is not None:
        return _based(urls, base_url)
    if found := next(filter(None, map(absolute, urls)), ""):
        return found
    reason = f"no absolute server address: {', '.join(urls)[:200] or 'none is given'}"
    fix = "Pass `base_url`, the address the paths are added to, such as `https://api.example.com/v1`."
    if own:
        raise Inexpressible(f"it has {reason}", fix)
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
    """Return a path with each `{wire name}` replaced as told, and everything else as literal text."""
    literal = path.partition("#")[0]
    parts = _PLACE.split(literal if literal.startswith("/") else f"/{literal}")
    # A split on one group gives text and name in turn.
    return "".join(names[part] if at % 2 else quote(part, safe=_LITERAL) for at, part in enumerate(parts))


def path_names(path: str) -> tuple[str, ...]:
    """Return the wire names a path has places for."""
    return tuple(dict.fromkeys(_PLACE.findall(path.partition("#")[0])))


def _based(urls: list[str], base_url: str) -> str:
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


def _substituted(server: Json) -> str:
    """Return the server's address with its variables at their defaults."""
    words = as_object(server)
    defaults = {
        name: str(as_object(variable).get("default", f"{{{name}}}"))
        for name, variable in as_object(words.get("variables")).items()
    }
    return _PLACE.sub(lambda place: defaults.get(place[1], place[0]), as_text(words.get("url")))
