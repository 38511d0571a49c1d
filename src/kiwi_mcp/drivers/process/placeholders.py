"""`{tool.files}` and the other values templates may name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, text_of
from kiwi_mcp.drivers.environments.environment import Environment
from kiwi_mcp.drivers.process.snapshot import snapshot_folder
from kiwi_mcp.manifest.templates import ABSENT, Values, placeholders, plain, render, variables

ENTRYPOINT = "{tool.files}/{tool.entrypoint}"
_ENTRYPOINT_NAME = "tool.entrypoint"


def facts_of(chain: Chain, space: Space, environment: Environment) -> Mapping[str, str]:
    """Return every fact of a chain by its name."""
    tool, runtime = chain.tool, chain.executor
    return {
        "tool.files": str(snapshot_folder(tool, space.cache, linked=environment.linked)),
        "tool.entrypoint": tool.entrypoint,
        "tool.id": tool.id,
        "tool.version": tool.manifest.version,
        "runtime.files": str(snapshot_folder(runtime, space.cache)),
        "environment": environment.folder,
        "project": str(space.project),
        "build": str(space.cache / "builds" / _digest(chain)),
        "binary": tool.id,
    }


def values_of(chain: Chain, inputs: JsonObject, facts: Mapping[str, str]) -> Values:
    """Return all that templates may name: parameters, absent ones marked as absent, and facts."""
    declared = as_object(chain.tool.manifest.parameters.get("properties"))
    return {**dict.fromkeys(declared, ABSENT), **inputs, **facts}


def fill(template: Sequence[str], values: Values) -> tuple[str, ...]:
    """Return the words of a command line; a list fills several words, an absent parameter none."""
    filled: list[str] = []
    for value in as_list(render(list(template), values)):
        several = value if isinstance(value, list) else [value]
        filled.extend(plain(text_of(word)) for word in several)
    return tuple(filled)


def check_words(chain: Chain, template: Sequence[str]) -> None:
    """Refuse words that cannot be filled safely: a variable among them, or a file the tool does not have."""
    issues = []
    if variables(list(template)):
        fix = "Move it to `config.env`, and read it there."
        issues.append(Issue("config.args", "a variable in a command line is visible to every user", fix))
    entrypoint = chain.tool.entrypoint
    if entrypoint and entrypoint not in {file.path for file in chain.tool.files}:
        fix = "Create it, or set `config.entrypoint` to one of the tool's files."
        issues.append(Issue("config.entrypoint", f"{entrypoint!r} is not a file of the tool", fix))
    if not entrypoint and names_entrypoint(template):
        fix = f"Set `config.entrypoint`, which {chain.executor.id!r} runs."
        issues.append(Issue("config.entrypoint", "the tool does not say which file to run", fix))
    if issues:
        raise InvalidManifest(f"{chain.tool.id!r} on {chain.executor.id!r}", issues)


def names_entrypoint(template: Sequence[str]) -> bool:
    """Whether any word is about the file to run."""
    return _ENTRYPOINT_NAME in placeholders(list(template))


def _digest(chain: Chain) -> str:
    return sha256("\n".join(link.digest for link in chain.links).encode()).hexdigest()
