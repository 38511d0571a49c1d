"""The part of a reply that a tool wants, by JSONPath, at a cost that is known before it starts."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

from jsonpath import JSONPath, JSONPathEnvironment, JSONPathError

from kiwi_mcp.domain.errors import InvalidManifest, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json

_COST_LIMIT = 5_000_000
"""The most nodes a path may visit: the size of the reply, to the power of the path's searches in depth."""

_environment = JSONPathEnvironment(strict=True)
# A regular expression in a filter can take for ever on a short text, and nothing can interrupt it.
for _name in ("match", "search"):
    del _environment.function_extensions[_name]


def transform(path: str, reply: Json) -> Json:
    """Return what the path names: one value where it can name only one, else the list of all it names."""
    compiled = compile_path(path)
    # A filter that begins at the root again looks at the whole reply for each of its nodes.
    depth = max(1, path.count("..")) + path.count("$") - 1
    size = _count(reply)
    if size**depth > _COST_LIMIT:
        raise TooLarge(f"The reply, for {path!r},", size=None, limit=_COST_LIMIT, unit="steps")
    found = cast("list[Json]", compiled.findall(reply))
    if compiled.singular_query():
        return found[0] if found else None
    return found


@lru_cache(maxsize=256)
def compile_path(path: str) -> JSONPath:
    """Return the compiled path; regular expressions are not part of it."""
    try:
        compiled = _environment.compile(path)
    except (JSONPathError, RecursionError) as error:
        reason = str(error).partition("\n")[0] or "is nested too deeply"
        issue = Issue("config.response_transform", reason, "Write an RFC 9535 path such as `$.items[0:5].name`.")
        raise InvalidManifest("The tool", [issue]) from error
    assert isinstance(compiled, JSONPath)  # noqa: S101 - the strict environment makes no compound paths
    return compiled


def _count(value: Json) -> int:
    total, waiting = 0, [value]
    while waiting:
        node = waiting.pop()
        total += 1
        if isinstance(node, dict):
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return total
