"""An MCP server as its manifest describes it: how it is reached, and what is known of it before it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Literal, TypeAlias

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.isolation import Jail, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.plan import HttpSpec, ProcessSpec
from kiwi_mcp.drivers.mcp.oauth.words import OAuth, oauth_words
from kiwi_mcp.drivers.packages import Package, packaged
from kiwi_mcp.drivers.process.environments import Environment
from kiwi_mcp.drivers.process.surroundings import base_env, find_program
from kiwi_mcp.drivers.words import Words, declared_env, seconds
from kiwi_mcp.manifest.render import defaulted, escape, render_text, variables
from kiwi_mcp.primitives.program import search_path
from kiwi_mcp.primitives.secrets import Revealed

Transport: TypeAlias = Literal["stdio", "http", "sse", "websocket"]

CALL_TIMEOUT = 60.0
"""How long one request may take, in seconds, where nothing else is written."""
STARTUP_TIMEOUT = 30.0
"""How long a server may take to start and to greet, in seconds, where nothing else is written."""
MAX_BYTES = 16_000_000
"""The most that one message of a server may have, in bytes, where nothing else is written."""
RECONNECT_DELAY = 0.5
"""What the waits between starts of a server that fails are multiples of, in seconds."""
_WITH_TOKENS: frozenset[Transport] = frozenset({"http", "sse"})
_SPELLINGS: Mapping[str, Transport] = {
    "stdio": "stdio",
    "http": "http",
    "streamable_http": "http",
    "streamable-http": "http",
    "sse": "sse",
    "websocket": "websocket",
}


@dataclass(frozen=True, slots=True)
class Server:
    """One server: its identity, the single act by which it is reached, and its limits."""

    identity: str
    digest: str
    transport: Transport
    spec: ProcessSpec | HttpSpec
    space: Space
    """Where it is started from, and where what Kiwi keeps for it lies."""
    jail: Jail = Jail(strictest(()))  # noqa: RUF009 - frozen all through
    """How its process is held; whoever does not say gets the strictest."""
    package: Package | None = None
    """What it is started from, where its command would fetch a package."""
    has_folder: bool = False
    """Whether its manifest names the folder that it starts in."""
    startup_timeout: float = STARTUP_TIMEOUT
    reconnect: bool = True
    reconnect_delay: float = RECONNECT_DELAY
    max_bytes: int = MAX_BYTES
    idle_timeout: float | None = None
    """How long it is kept while nobody uses it, in seconds, where its manifest says so."""
    variables: tuple[str, ...] = ()
    """Every `${NAME}` by which it is reached."""
    defaulted: tuple[str, ...] = ()
    """Those of them that it can do without."""
    warnings: tuple[str, ...] = ()
    oauth: OAuth | None = None
    """How its tokens are had, where it can have any."""

    @property
    def name(self) -> str:
        """The short name of the server."""
        return self.identity.rpartition("/")[2].partition("@")[0]

    def key(self, secrets: Mapping[str, str]) -> str:
        """Return what a connection is shared by: the server, where and how it runs, whose credentials, which hosts."""
        where: Json
        match self.spec:
            case ProcessSpec(cwd=cwd):
                where = [cwd, _jail_text(self.jail)]
            case HttpSpec(granted=granted, denied=denied):
                where = [list(granted), list(denied)]
        # What a stored secret is for may be narrowed while a connection is open, which must not go on with it then.
        bounds = secrets.bounds if isinstance(secrets, Revealed) else {}
        held: Json = [[name, list(bound.hosts), bound.form] for name, bound in sorted(bounds.items())]
        given: Json = sorted([*pair] for pair in secrets.items())
        parts: Json = [self.identity, self.digest, self.transport, where, given, held]
        return sha256(compact(parts).encode(errors="surrogatepass")).hexdigest()


@lru_cache(maxsize=256)
def _jail_text(jail: Jail) -> str:
    return compact(jail.to_json())


_servers: OrderedDict[tuple[int, Space, str], tuple[Tool, Server]] = OrderedDict()
_SERVERS_KEPT = 512


def server_of(link: Tool, space: Space) -> Server:
    """Return the server that a manifest describes, read once for as long as the catalog gives the same manifest."""
    key = (id(link), space, search_path())
    known = _servers.get(key)
    if known is None or known[0] is not link:
        known = _servers[key] = (link, _read(link, space))
        if len(_servers) > _SERVERS_KEPT:
            _servers.popitem(last=False)
    return known[1]


def _read(link: Tool, space: Space) -> Server:
    config = link.manifest.config
    transport = _SPELLINGS.get(as_text(config.get("transport")))
    if transport is None:
        fix = f"Use one of: {', '.join(_SPELLINGS)}."
        raise InvalidManifest(f"{link.id!r}", [Issue("config.transport", "is no transport that is spoken", fix)])
    limit = config.get("max_bytes")
    max_bytes = limit if isinstance(limit, int) and not isinstance(limit, bool) else MAX_BYTES
    spec, package = _process(link, space) if transport == "stdio" else (_address(config, max_bytes), None)
    oauth = _oauth(link, space, spec) if isinstance(spec, HttpSpec) and transport in _WITH_TOKENS else None
    words: Json = [_words(spec), oauth.words if oauth else None]
    return Server(
        identity=link.identity,
        digest=link.digest,
        transport=transport,
        spec=replace(spec, timeout=seconds(config.get("timeout"), CALL_TIMEOUT)),
        space=space,
        package=package,
        has_folder=bool(config.get("cwd")),
        startup_timeout=seconds(config.get("startup_timeout"), STARTUP_TIMEOUT),
        reconnect=config.get("reconnect") is not False,
        reconnect_delay=seconds(config.get("reconnect_delay"), RECONNECT_DELAY),
        max_bytes=max_bytes,
        idle_timeout=seconds(config.get("idle_timeout"), 0.0) or None,
        variables=variables(words),
        defaulted=defaulted(words),
        warnings=_warnings(link, spec),
        oauth=oauth,
    )


def _words(spec: ProcessSpec | HttpSpec) -> Json:
    """Return all words of a spec in which variables may stand."""
    match spec:
        case ProcessSpec():
            return [list(spec.argv), dict(spec.env)]
        case HttpSpec():
            return [spec.url, dict(spec.headers), list(spec.basic or ())]


def _oauth(link: Tool, space: Space, spec: HttpSpec) -> OAuth | None:
    """Return how the tokens of a server are had; None for one whose manifest says what it is sent instead."""
    if spec.basic is not None or "authorization" in {name.lower() for name in spec.headers}:
        return None
    home = str(space.project_ai) if link.origin.source == "project" else ""
    name = compact([home, link.identity.partition("@")[0]])
    return oauth_words(as_object(link.manifest.config.get("auth")), name, space.user / "state")


def _warnings(link: Tool, spec: ProcessSpec | HttpSpec) -> tuple[str, ...]:
    visible = variables(list(spec.argv)) if isinstance(spec, ProcessSpec) else ()
    return tuple(
        f"the value of {name} stands in the command line of {link.id!r}, where every user of this machine can read it; "
        "a secret belongs into `config.env`"
        for name in visible
    )


_PROJECT = "{project}"


def _process(link: Tool, space: Space) -> tuple[ProcessSpec, Package | None]:
    config = link.manifest.config
    own = {name: escape(value) for name, value in base_env(Chain((link,), ""), space, Environment()).items()}
    here = str(space.project)
    command = as_text(config.get("command")).replace(_PROJECT, here)
    written = [text_of(word) for word in as_list(config.get("args"))]
    found = packaged(command, written, space.cache)
    package, (command, *lead), arguments = (
        (found[0], found[0].command, found[1]) if found else (None, (command,), tuple(written))
    )
    # The program of a package is known by its whole name, and is there once the package is.
    program = (
        command if package and "/" in command else find_program(command, Words(link.id, command=()), Environment())
    )
    rendered = (render_text(word, {"project": here}) for word in arguments)
    declared = {name: render_text(value, {"project": here}) for name, value in declared_env(link).items()}
    folder = space.project / as_text(config.get("cwd")).replace(_PROJECT, here)
    return ProcessSpec(argv=(program, *lead, *rendered), cwd=str(folder), env={**declared, **own}), package


def _address(config: JsonObject, max_bytes: int) -> HttpSpec:
    auth = as_object(config.get("auth"))
    url = as_text(config.get("url"))
    if auth.get("type") == "api_key" and auth.get("in") == "query":
        url += f"{'&' if '?' in url else '?'}{as_text(auth.get('name'))}={as_text(auth.get('key'))}"
    headers = {name: text_of(value) for name, value in as_object(config.get("headers")).items()}
    return HttpSpec(
        method="POST",
        url=url,
        headers={**headers, **_auth_headers(auth)},
        basic=(as_text(auth.get("username")), as_text(auth.get("password"))) if auth.get("type") == "basic" else None,
        max_bytes=max_bytes,
        max_redirects=0,
    )


def _auth_headers(auth: JsonObject) -> Mapping[str, str]:
    secret = as_text(auth.get("token")) or as_text(auth.get("key"))
    match auth:
        case {"type": "bearer"}:
            return {"Authorization": f"Bearer {secret}"}
        case {"type": "api_key" | "header"} if auth.get("in") != "query":
            return {as_text(auth.get("name")) or as_text(auth.get("header")) or "X-API-Key": secret}
        case _:
            return {}
