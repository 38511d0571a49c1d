"""`server.json`, in which registries of MCP servers describe one: its packages and addresses, read into drafts."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.version import Version
from kiwi_mcp.kernel.mcp.drafts import (
    FIRST_VERSION,
    Imported,
    ServerDraft,
    id_for,
    manifest_of,
    remote_config,
    stdio_config,
)
from kiwi_mcp.kernel.mcp.jsonc import read_object
from kiwi_mcp.kernel.mcp.launch import Launch
from kiwi_mcp.kernel.mcp.references import Gathered, variable_name
from kiwi_mcp.kernel.mcp.spotting import names_secret

_WHAT = "server.json"
_SNAKE = re.compile(r"_([a-z])")
_NAMED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TAGGED = re.compile(r".*(?:@sha256:[0-9a-f]{64}|:[\w][\w.-]*)", re.DOTALL)
_REMOTES: Mapping[str, str] = {"streamable-http": "http", "streamable": "http", "http": "http", "sse": "sse"}
_DOCKER_HUB = frozenset({"", "docker.io", "index.docker.io"})
_MAX_WAYS = 50


@dataclass(frozen=True, slots=True)
class _Kind:
    """How packages of one registry are started: the programs that can, and the words before the package."""

    programs: tuple[str, ...]
    lead: tuple[str, ...] = ()


_KINDS: Mapping[str, _Kind] = {
    "npm": _Kind(("npx", "bunx"), ("-y",)),
    "pypi": _Kind(("uvx",)),
    "oci": _Kind(("docker", "podman"), ("run", "-i", "--rm")),
}


@dataclass(frozen=True, slots=True)
class _Reader:
    """One description under way: the server's name in it, and what is gathered on the way."""

    name: str
    gathered: Gathered

    def value(self, words: JsonObject, *, called: str) -> str | None:
        """Return what an input is: its value, its default, or the variable the owner sets; None for one left out."""
        written = as_text(words.get("value"))
        if written:
            inner = as_object(words.get("variables"))
            return _NAMED.sub(lambda found: self._inner(found, inner), written)
        is_secret = words.get("isSecret") is True or names_secret(called)
        default = as_text(words.get("default"))
        if default and not is_secret:
            is_plain = not re.search("[{}$]", default)
            return f"${{{self._variable(called)}:-{default}}}" if is_plain else default
        return self._asked(words, called) if words.get("isRequired") is True else None

    def arguments(self, listed: Json) -> Iterator[str]:
        """Give the words of a command line, without those that are optional and have no value."""
        for words in map(as_object, as_list(listed)):
            flag = as_text(words.get("name")) if words.get("type") == "named" else ""
            called = flag.lstrip("-") or as_text(words.get("valueHint")) or "argument"
            is_switch = bool(flag) and words.get("format") == "boolean" and not as_text(words.get("value"))
            value = None if is_switch else self.value(words, called=variable_name(self.name, called))
            if flag and (value is not None or (is_switch and words.get("default") == "true")):
                yield flag
            if value is not None:
                yield value

    def pairs(self, listed: Json, *, own_names: bool, place: str) -> dict[str, str]:
        """Return variables or headers with their values."""
        found, spare = {}, []
        for words in map(as_object, as_list(listed)):
            name = as_text(words.get("name"))
            value = self.value(words, called=name if own_names else variable_name(self.name, name))
            if name and value is not None:
                found[name] = value
            elif name:
                spare.append(name)
        if spare:
            fix = "To use one, write it into the manifest with a value of `${NAME}`, and set NAME."
            self.gathered.warn(place, f"optional, and left out: {', '.join(spare[:20])}", fix)
        return found

    def _inner(self, found: re.Match[str], variables: JsonObject) -> str:
        if found[1] not in variables:
            return found[0]
        words = as_object(variables[found[1]])
        called = variable_name(self.name, found[1])
        return self.value(words, called=called) or self._asked(words, called)

    def _asked(self, words: JsonObject, called: str) -> str:
        name = self._variable(called)
        about = as_text(words.get("description")) or as_text(words.get("placeholder"))
        self.gathered.variables.setdefault(name, " ".join(about.split())[:200] or f"needed by {self.name}")
        return f"${{{name}}}"

    def _variable(self, called: str) -> str:
        return called if re.fullmatch(r"[A-Za-z_]\w*", called, re.ASCII) else variable_name(called)


def read_server_json(text: str, *, taken: Collection[str] = ()) -> Imported:
    """Return the server that a `server.json` describes, by its first way that Kiwi can use; `others` are the rest."""
    root = _modern(read_object(text, what=_WHAT))
    words = as_object(root.get("server")) or root
    full = as_text(words.get("name"))
    reader = _Reader(full.rpartition("/")[2] or "server", Gathered())
    if not full:
        reader.gathered.issues.append(Issue("name", "is missing", "Give the server a name."))
    if (status := as_text(words.get("status"))) in {"deprecated", "deleted"}:
        reader.gathered.warn("status", f"the server is {status}", "Look for one that takes its place.")
    tool_id = id_for(reader.name, taken)
    drafts = [_draft(full, tool_id, words, config) for config in _ways(words, reader)] if full else []
    if full and not drafts:
        fix = "Ask its author for a package of npm or PyPI, an image, or an address."
        reader.gathered.issues.append(Issue("packages", "holds no way that Kiwi can use", fix))
    found = reader.gathered
    return Imported(
        tuple(drafts[:1]), tuple(found.issues), dict(found.secrets), dict(found.variables), tuple(drafts[1:])
    )


def _draft(full: str, tool_id: str, words: JsonObject, config: JsonObject) -> ServerDraft:
    written = as_text(words.get("version")) or as_text(as_object(words.get("versionDetail")).get("version"))
    version = written if Version.parse(written) is not None and written != "0.0.0" else FIRST_VERSION
    description = " ".join(as_text(words.get("description")).split())[:300] or f"MCP server {full[:200]}"
    return ServerDraft(full, manifest_of(tool_id, description, config, version=version))


def _ways(words: JsonObject, reader: _Reader) -> Iterator[JsonObject]:
    for listed, read in (("packages", _package), ("remotes", _remote)):
        for index, way in enumerate(as_list(words.get(listed))[:_MAX_WAYS]):
            place = f"{listed}[{index}]"
            # The format has no such reference, and the owner's variables are not for its author to name.
            if "${" in compact(way):
                reader.gathered.warn(place, "names a variable of yours, and is left out", "Do not use this server.")
            elif (config := read(as_object(way), reader, place)) is not None:
                yield config


def _package(words: JsonObject, reader: _Reader, place: str) -> JsonObject | None:
    kind = as_text(words.get("registryType")) or as_text(words.get("registryName"))
    identifier = as_text(words.get("identifier")) or as_text(words.get("name"))
    transport = as_text(as_object(words.get("transport")).get("type")) or "stdio"
    if kind not in _KINDS or not identifier or identifier.startswith("-"):
        reader.gathered.warn(
            place, f"packages of {kind[:40] or 'no registry'!r} are not started by Kiwi", "Use another way."
        )
        return None
    if transport != "stdio":
        reader.gathered.warn(
            place, f"a package that listens ({transport[:40]}) is not started by Kiwi", "Use another way."
        )
        return None
    env = reader.pairs(words.get("environmentVariables"), own_names=True, place=f"{place}.environmentVariables")
    rest = tuple(reader.arguments(words.get("packageArguments")))
    lead = _lead(kind, tuple(reader.arguments(words.get("runtimeArguments"))), env)
    args = (*lead, _pinned(kind, identifier, words), *rest)
    return stdio_config(reader.name, Launch(_program(kind, words, reader, place), args, env), reader.gathered)


def _program(kind: str, words: JsonObject, reader: _Reader, place: str) -> str:
    hint, programs = as_text(words.get("runtimeHint")), _KINDS[kind].programs
    if hint and hint not in programs:
        reason = f"`{hint[:40]}` is not what starts packages of {kind}; `{programs[0]}` is used"
        reader.gathered.warn(f"{place}.runtimeHint", reason, "Change `config.command` if it must be another program.")
    return hint if hint in programs else programs[0]


def _lead(kind: str, own: tuple[str, ...], env: Mapping[str, str]) -> tuple[str, ...]:
    lead = tuple(word for word in _KINDS[kind].lead if word not in own)
    # A container sees no variable that is not handed in, and by name alone, so that no value is among the words.
    handed = tuple(word for name in env for word in ("-e", name)) if kind == "oci" else ()
    return (*lead, *own, *handed)


def _pinned(kind: str, identifier: str, words: JsonObject) -> str:
    version = as_text(words.get("version"))
    if kind == "oci":
        host = as_text(words.get("registryBaseUrl")).partition("://")[2].strip("/")
        image = identifier if host in _DOCKER_HUB or identifier.startswith(f"{host}/") else f"{host}/{identifier}"
        is_tagged = _TAGGED.fullmatch(image.rpartition("/")[2]) is not None
        return f"{image}:{version}" if version and not is_tagged else image
    return f"{identifier}@{version}" if version else identifier


def _remote(words: JsonObject, reader: _Reader, place: str) -> JsonObject | None:
    written = as_text(words.get("type")) or as_text(words.get("transportType"))
    transport, url = _REMOTES.get(written), as_text(words.get("url"))
    if transport is None or not url:
        reader.gathered.warn(place, f"is reached by {written[:40]!r}, which Kiwi does not speak", "Use another way.")
        return None
    filled = reader.value({"value": url, "variables": words.get("variables")}, called="url") or url
    headers = reader.pairs(words.get("headers"), own_names=False, place=f"{place}.headers")
    return remote_config(reader.name, filled, headers, transport, reader.gathered)


def _modern(words: JsonObject) -> JsonObject:
    """Return a description with the words of today: earlier drafts wrote `registry_type` for `registryType`."""
    return {
        _SNAKE.sub(lambda found: found[1].upper(), key) if not key.startswith("_") else key: _modern_value(key, value)
        for key, value in words.items()
    }


def _modern_value(key: str, value: Json) -> Json:
    if key == "variables":
        # Its keys are names of the author's own.
        return {name: _modern_value("", inner) for name, inner in as_object(value).items()}
    if isinstance(value, Mapping):
        return _modern(value)
    return [_modern_value("", inner) for inner in value] if isinstance(value, list | tuple) else value
