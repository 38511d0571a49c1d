"""An entry of a client's configuration as the manifest of an `mcp_server`.

References of other clients (`${env:NAME}`, `${input:NAME}`) become those of Kiwi, and references replace secrets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.isolation import CERTIFICATE_VARIABLES
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.names import is_tool_id, unused_name
from kiwi_mcp.domain.secret import Secret, is_filler, is_secret, looks_secret, names_secret
from kiwi_mcp.manifest.formats import is_url, is_variable
from kiwi_mcp.manifest.mcp.launch_command import ServerCommand, anchor, hosts_named, known_server, unpinned, unwrap

_REFERENCE = re.compile(r"\$\{([^{}$]*)\}")
_VARIABLE = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)(:-[^{}]*)?", re.ASCII)
_PLACEHOLDER = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z][A-Za-z0-9_]*)*\}")
_SCHEME = re.compile(r"((?:bearer|basic|token|apikey|digest)\s+)(.*)", re.IGNORECASE | re.DOTALL)
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9]+")
_OPEN_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie"})
_PROJECT = "{project}"
_FIXED: Mapping[str, str] = {
    "workspaceFolder": _PROJECT,
    "workspaceRoot": _PROJECT,
    "cwd": _PROJECT,
    "CLAUDE_PROJECT_DIR": _PROJECT,
    "userHome": "${HOME}",
    "pathSeparator": "/",
    "/": "/",
}
_ALWAYS_SET = frozenset({"HOME", "USER", "LANG", "TMPDIR"})
_SHORTEST_PART = 8
_MARK = "\ue000"
"""Stands for a reference while an address is taken apart; no address has this character."""


class ImportFindings(Struct):
    """What is found in a configuration besides its servers: secrets, variables to set, and issues."""

    inputs: Mapping[str, JsonObject] = field(default_factory=dict)
    secrets: dict[str, Secret] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    hashes: dict[str, bytes] = field(default_factory=dict)
    """A hash of each secret, to compare two secrets without reading them again."""

    def warn(self, place: str, reason: str, fix: str) -> None:
        """Note something that the owner should look at."""
        self.issues.append(Issue(place, reason, fix, "warning"))

    def put_aside(self, wanted: str, value: str, *, owner: str, purpose: str) -> str:
        """Put a secret aside and return the reference to it; one value has one name, two values have two."""
        if is_filler(value):
            self.variables.setdefault(wanted, purpose)
            return f"${{{wanted}}}"
        name, number = wanted, 1
        digest = sha256(value.encode(errors="surrogatepass")).digest()
        while self.hashes.setdefault(name, digest) != digest:
            own = wanted if wanted.startswith(f"{variable_name(owner)}_") else variable_name(owner, wanted)
            name = own if number == 1 and own != wanted else f"{own}_{number + 1}"
            number += 1
        self.secrets[name] = Secret(value)
        self.variables.setdefault(name, purpose)
        return f"${{{name}}}"


def variable_name(*parts: str) -> str:
    """Return the name of a variable made of words: `("my server", "X-Api-Key")` is `MY_SERVER_API_KEY`."""
    words = [_NOT_IN_NAME.sub("_", part.removeprefix("X-").removeprefix("x-")).strip("_").upper() for part in parts]
    name = "_".join(word for word in words if word.isascii() and word)
    return (f"_{name}" if name[:1].isdigit() else name)[:120] or "SECRET"


def translate(text: str, findings: ImportFindings, *, place: str, stands_for: str) -> str:
    """Return a text with the references of other clients as Kiwi writes them, and its own braces kept apart.

    `stands_for` names the variable for a reference that only the client could resolve.
    """
    return _between(text, findings, place, stands_for, lambda _: "")


def protect(text: str, findings: ImportFindings, *, name: str, stands_for: str, owner: str, place: str) -> str:
    """Return a text for a manifest: secrets put aside as references, other clients' references translated."""
    purpose = f"`{name}` of {owner}" if name else f"an argument of {owner}"
    if "${" not in text:
        if is_secret(name, text):
            return findings.put_aside(stands_for, text, owner=owner, purpose=purpose)
        return _literal(text, findings, place)

    def hide(part: str) -> str:
        return findings.put_aside(stands_for, part, owner=owner, purpose=purpose) if looks_secret(part) else ""

    return _between(text, findings, place, stands_for, hide)


def protect_header(name: str, text: str, findings: ImportFindings, *, owner: str, place: str) -> str:
    """Return a header's value for a manifest; of `Bearer …` and the like only the second word is the secret."""
    is_open = name.lower() in _OPEN_HEADERS or names_secret(name)
    stands_for = variable_name(owner, "token" if name.lower() == "authorization" else name)
    scheme = _SCHEME.fullmatch(text)
    word, rest = (scheme[1], scheme[2]) if scheme else ("", text)
    if "${" not in rest:
        if (is_open and rest) or looks_secret(rest):
            return word + findings.put_aside(stands_for, rest, owner=owner, purpose=f"header `{name}` of {owner}")
        return word + _literal(rest, findings, place)

    def hide(part: str) -> str:
        is_long = is_open and len(part.strip()) >= _SHORTEST_PART
        if not is_long and not looks_secret(part):
            return ""
        return findings.put_aside(stands_for, part, owner=owner, purpose=f"header `{name}` of {owner}")

    return word + _between(rest, findings, place, stands_for, hide)


def _between(text: str, findings: ImportFindings, place: str, stands_for: str, hide: Callable[[str], str]) -> str:
    """Return a text with references translated, and the text between them hidden where it must be."""
    done, end = "", 0
    for found in [*_REFERENCE.finditer(text), None]:
        part = text[end : found.start() if found else len(text)]
        done += hide(part) or _literal(part, findings, place)
        if found:
            done, end = done + _translated(found, findings, place, stands_for), found.end()
    return done


def _translated(found: re.Match[str], findings: ImportFindings, place: str, stands_for: str) -> str:
    body = found[1]
    kind, colon, rest = body.partition(":")
    if body in _FIXED or (kind in _FIXED and colon):
        return _FIXED[kind]
    if variable := _VARIABLE.fullmatch(body):
        name, default = variable[1], variable[2] or ""
        if default and is_secret(name, default.removeprefix(":-")):
            return findings.put_aside(name, default.removeprefix(":-"), owner=stands_for, purpose=place)
        if not default and name not in _ALWAYS_SET:
            findings.variables.setdefault(name, place)
        return f"${{{name}{default}}}"
    if kind == "input":
        # The variable that takes the place of a question the client would have asked.
        name, words = variable_name(rest), findings.inputs.get(rest, {})
        default = as_text(words.get("default"))
        purpose = as_text(words.get("description")) or f"the input `{rest}`"
        if default and (words.get("password") is True or is_secret(name, default)):
            return findings.put_aside(name, default, owner=rest, purpose=purpose)
        if default and not re.search("[{}]", default):
            return f"${{{name}:-{default}}}"
        findings.variables.setdefault(name, purpose)
        return f"${{{name}}}"
    fix = f"Set {stands_for}, in the environment or in the user's .env, to what it gave there."
    findings.warn(place, f"`${{{kind if kind.isidentifier() else ''}…}}` means something to that client alone", fix)
    findings.variables.setdefault(stands_for, place)
    return f"${{{stands_for}}}"


def _literal(text: str, findings: ImportFindings, place: str) -> str:
    """Return text that reads as itself in a manifest."""
    if "${" in text:
        fix = "Write it as `${NAME}` or `${NAME:-default}`, without a reference inside another."
        findings.warn(place, "holds a `${` that is not understood, and is kept as it is written", fix)
        text = text.replace("${", "$${")
    return _PLACEHOLDER.sub(r"{\g<0>}", text)


def protect_url(url: str, findings: ImportFindings, *, owner: str, place: str) -> str:
    """Return an address for a manifest: a login, a key in its path and secret values of its query put aside."""
    # References may contain slashes and question marks, so they are set aside while the rest is parsed.
    references = _REFERENCE.finditer(url := url.replace(_MARK, ""))
    address, question, query = _REFERENCE.sub(_MARK, url).partition("?")
    scheme, colon, rest = address.rpartition("://")
    lead, *path = rest.split("/")
    login, _, host = lead.rpartition("@")
    if login and _MARK not in login:
        login = findings.put_aside(variable_name(owner, "login"), login, owner=owner, purpose=f"login at {host[:80]}")
    segments = [_url_part("", part, findings, owner, place) for part in path]
    pairs: list[str] = []
    for name, equals, value in (pair.partition("=") for pair in query.split("&")):
        part = _url_part(unquote(name), value, findings, owner, place) if equals else value
        pairs.append(name + equals + part)
    done = scheme + colon + login + ("@" if login else "") + "/".join([host, *segments]) + question + "&".join(pairs)
    stands_for = variable_name(owner, "url")
    return re.sub(_MARK, lambda _: _translated(next(references), findings, place, stands_for), done)


def _url_part(name: str, part: str, findings: ImportFindings, owner: str, place: str) -> str:
    stands_for = variable_name(owner, name or "key")
    if _MARK not in part and is_secret(name, unquote(part)):
        purpose = f"`{name}` in the address of {owner}" if name else f"part of the address of {owner}"
        return findings.put_aside(stands_for, unquote(part), owner=owner, purpose=purpose)
    return _literal(part, findings, place)


_MAX_ID = 100
_MAX_DESCRIPTION = 300
_NOT_IN_ID = re.compile(r"[^a-z0-9_-]+")
_HEADER = re.compile(r"([A-Za-z][A-Za-z0-9-]*):\s*(\S.*)")
_HEADER_FLAGS = frozenset({"-H", "--header", "--headers"})
_ASSIGNED = re.compile(r"(--?[A-Za-z][\w-]*|[A-Za-z_]\w*)=(.+)", re.DOTALL)
_WEB = re.compile(r"(?:https?|wss?)://", re.IGNORECASE)
_HOME = re.compile(r"\$\{(?:userHome|HOME|env:HOME)\}")
_URL_WORDS = ("url", "serverUrl", "httpUrl")
_TRANSPORTS: Mapping[str, str] = {
    "http": "http", "streamable-http": "http", "streamable_http": "http", "streamablehttp": "http",
    "sse": "sse", "ws": "websocket", "wss": "websocket", "websocket": "websocket",
}  # fmt: skip
_KNOWN_WORDS = frozenset({
    "type", "transport", "transportType", "command", "args", "env", "cwd", "headers", "disabled", "enabled", "name",
    "description", "autoApprove", "alwaysAllow", "gallery", "version", "dev", "icon", "trust", "$schema", *_URL_WORDS,
})  # fmt: skip

_OWN_SCRIPT = "Start the server by a script of your own that sets it, if it needs it."
_CERTIFICATES = "Append the certificates to `~/.ai/certificates.pem`: every server trusts those."


class ServerDraft(Struct, frozen=True):
    """A server that can become an item: its name there, and the manifest that `execute create` takes."""

    name: str
    manifest: JsonObject
    is_disabled: bool = False
    project: str = ""
    """The one project for which the client knows it; empty where it is known everywhere."""

    @property
    def tool_id(self) -> str:
        """The name the item will have."""
        return text_of(self.manifest["tool_id"])


class ImportedServers(Struct, frozen=True):
    """The servers of a configuration, without the secrets they were written with, which are separate.

    `variables` are the names that must be set before the servers run, each with its purpose; those of `secrets` have a
    value that was in the configuration.
    """

    servers: tuple[ServerDraft, ...] = ()
    issues: tuple[Issue, ...] = ()
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


class EntryOrigin(Struct, frozen=True):
    """Where a server is described: by whom, and which folders its words may be relative to."""

    title: str
    home: Path
    project: Path | None = None


def draft_server(
    name: str, words: JsonObject, findings: ImportFindings, *, origin: EntryOrigin, tool_id: str
) -> JsonObject | None:
    """Return the manifest of a server in the words of a client; None, with an issue, where it cannot be one."""
    config = _config(name, words, findings, origin)
    if config is None:
        return None
    if unknown := sorted(set(words) - _KNOWN_WORDS):
        listed = ", ".join(f"`{word[:40]}`" for word in unknown[:10])
        findings.warn(name, f"not carried over: {listed}", "Look at what they did there, and set it up again here.")
    args = tuple(map(text_of, as_list(words.get("args"))))
    env = {name: text_of(value) for name, value in as_object(words.get("env")).items()}
    launch = unwrap(ServerCommand(as_text(words.get("command")).strip(), args, env))
    known = known_server(launch.command, launch.args)
    # Before secrets are put aside: an address may be one because of the login in it.
    hosts = hosts_named(launch.args, launch.env) if known and known.urls else ()
    described = " ".join(as_text(words.get("description")).split())[:_MAX_DESCRIPTION]
    return {
        "tool_id": tool_id,
        "tool_type": "mcp_server",
        "version": "1.0.0",
        "executor": "subprocess" if config["transport"] == "stdio" else "http_client",
        "description": described or f"MCP server {name[:80]!r}, as {origin.title} has it",
        "config": config,
        **({"needs": {"hosts": [*hosts]}} if hosts else {}),
    }


def id_for(name: str, taken: Collection[str]) -> str:
    """Return the name of the item for a server; one that is taken gets a number."""
    plain = _NOT_IN_ID.sub("_", name.lower()).strip("_-")[:_MAX_ID].rstrip("_-") or "server"
    return unused_name(plain if is_tool_id(plain) else f"mcp_{plain}", taken)


def stdio_config(name: str, launch: ServerCommand, findings: ImportFindings, *, cwd: str = "") -> JsonObject:
    """Return the config of a server that is started here, with secrets put aside."""
    place = f"{name}.args"
    stands_for = variable_name(name, "command")
    command = translate(launch.command, findings, place=f"{name}.command", stands_for=stands_for)
    config: dict[str, Json] = {"transport": "stdio", "command": command}
    known = len(findings.secrets)
    pairs = zip(("", *launch.args), launch.args, strict=False)
    args = tuple(_argument(before, word, findings, owner=name, place=place) for before, word in pairs)
    if len(findings.secrets) > known:
        fix = "If the server can read it from a variable, put it into `config.env` and take it out of `config.args`."
        findings.warn(place, "holds a secret, and the words of a command are visible to every user", fix)
    if args:
        config["args"] = list(args)
    env: dict[str, Json] = {}
    for word, value in launch.env.items():
        at = f"{name}.env.{word}"
        if is_variable(word):
            env[word] = protect(value, findings, name=word, stands_for=word, owner=name, place=at)
        else:
            reason = "is left out: loaders, interpreters or Kiwi itself obey this variable"
            findings.warn(at, reason, _CERTIFICATES if word in CERTIFICATE_VARIABLES else _OWN_SCRIPT)
    if env:
        config["env"] = env
    if cwd and cwd != "{project}":
        config["cwd"] = cwd
    if issue := unpinned(replace(launch, args=args)):  # which quotes one of them
        findings.issues.append(replace(issue, place=place))
    return config


def _config(name: str, words: JsonObject, findings: ImportFindings, origin: EntryOrigin) -> JsonObject | None:
    url = next((text for word in _URL_WORDS if (text := as_text(words.get(word)).strip())), "")
    command = as_text(words.get("command")).strip()
    args = as_list(words.get("args"))
    if words.get("args") is not None and not isinstance(words["args"], list | tuple):
        findings.issues.append(Issue(f"{name}.args", "is not a list", 'Write each word apart: ["-y", "package"].'))
        return None
    if command:
        env = _texts(words.get("env"), findings, f"{name}.env")
        launch = unwrap(ServerCommand(command, tuple(map(text_of, args)), env))
        if launch.is_kiwi:
            findings.warn(name, "is Kiwi itself, and is left out", "Nothing needs to be done.")
            return None
        if known := known_server(launch.command, launch.args):
            defaults = {word: _at_home(value, origin.home) for word, value in known.env.items()}
            launch = replace(launch, env={**defaults, **launch.env})
        cwd, folder = _folder(name, _at_home(as_text(words.get("cwd")).strip(), origin.home), findings, origin)
        command = anchor(_at_home(launch.command, origin.home), folder=folder)
        if command.startswith(("./", "../")):
            findings.warn(f"{name}.command", "is relative to a folder that is not known", "Write the whole path.")
        return stdio_config(name, replace(launch, command=command), findings, cwd=cwd)
    if url:
        transport = _transport(as_text(words.get("type")) or as_text(words.get("transport")), url)
        headers = _texts(words.get("headers"), findings, f"{name}.headers")
        # The config of a server that is reached by address, with secrets put aside.
        address = protect_url(url, findings, owner=name, place=f"{name}.url")
        if not is_url(address):
            findings.issues.append(Issue(f"{name}.url", "is not an address of the web", "Use http, https, ws or wss."))
            return None
        config: dict[str, Json] = {"transport": transport, "url": address}
        if headers:
            config["headers"] = {
                header: protect_header(header, value, findings, owner=name, place=f"{name}.headers.{header}")
                for header, value in headers.items()
            }
        return config
    findings.issues.append(Issue(name, "has neither a command nor an address", "Write `command` or `url`."))
    return None


def _folder(name: str, cwd: str, findings: ImportFindings, origin: EntryOrigin) -> tuple[str, Path | None]:
    """Return where a server starts, as a manifest says it and, where it is known now, as a path."""
    if not cwd:
        return "", origin.project
    if "${" not in cwd:
        folder = origin.project / cwd if origin.project is not None else Path(cwd)
        return "{project}" if folder == origin.project else str(folder), folder
    place = f"{name}.cwd"
    response = translate(cwd, findings, place=place, stands_for=variable_name(name, "cwd"))
    if "${" in response:
        findings.warn(place, "depends on a variable, and is left out", "Write the whole path into `config.cwd`.")
        return "", None
    return response, None


def _at_home(text: str, home: Path) -> str:
    """Return a path with the home folder in it: programs and folders are looked up before variables have values."""
    text = f"{home}{text[1:]}" if text.startswith("~/") else text
    return _HOME.sub(lambda _: str(home), text)


def _transport(written: str, url: str) -> str:
    if known := _TRANSPORTS.get(written.lower()):
        return known
    if url.lower().startswith(("ws:", "wss:")):
        return "websocket"
    try:
        return "sse" if urlsplit(url).path.rstrip("/").endswith("/sse") else "http"
    except ValueError:
        return "http"


def _texts(value: Json, findings: ImportFindings, place: str) -> dict[str, str]:
    """Return an object of texts; numbers and truth values as text, and null as not set."""
    found = {}
    for name, inner in as_object(value).items():
        if isinstance(inner, str | int | float):
            found[name] = text_of(inner)
        elif inner is not None:
            findings.warn(f"{place}.{name}", "is not text, and is left out", "Write it as text.")
    return found


def _argument(before: str, word: str, findings: ImportFindings, *, owner: str, place: str) -> str:
    header, assigned = _HEADER.fullmatch(word), _ASSIGNED.fullmatch(word)
    if header and (before in _HEADER_FLAGS or names_secret(header[1])):
        spelled = word[: -len(header[2])]
        return spelled + protect_header(header[1], header[2], findings, owner=owner, place=place)
    if _WEB.match(word):
        return protect_url(word, findings, owner=owner, place=place)
    name, value, lead = "", word, ""
    if assigned:
        name, value, lead = assigned[1], assigned[2], f"{assigned[1]}="
    elif before.startswith("-") and not word.startswith("-"):
        name = before
    is_own = bool(assigned) and not name.startswith("-")
    fallback = "url" if "://" in value else "secret"
    stands_for = name if is_own else variable_name(owner, name.lstrip("-") or fallback)
    return lead + protect(value, findings, name=name, stands_for=stands_for, owner=owner, place=place)
