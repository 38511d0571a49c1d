"""The configuration of a server and of its OAuth login, and the plan of one request to it."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidArguments, InvalidManifest
from kiwi_mcp.domain.isolation import SandboxProfile, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.mcp import expand, names_in
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.drivers.environments.environment import Environment, base_env
from kiwi_mcp.drivers.environments.packages import Package, server_package
from kiwi_mcp.drivers.http import auth_headers, basic_auth
from kiwi_mcp.manifest.runtime import declared_env, seconds
from kiwi_mcp.manifest.templates import defaulted, escape, render_text, variables
from kiwi_mcp.primitives.process.spawn import find_program, search_path
from kiwi_mcp.primitives.secrets.reveal import Revealed

RESTART = "restart"


@lru_cache(maxsize=256)
def log_path(space: Space, identity: str) -> Path:
    """Return where the last output of a server's process is stored."""
    name = sha256(identity.partition("@")[0].encode()).hexdigest()[:16]
    return space.user / "state" / "mcp" / name / "stderr.log"


def restarted_at(space: Space, identity: str) -> int:
    """Return when the owner last asked for a restart of a server, in nanoseconds; 0 if never."""
    try:
        return os.stat(log_path(space, identity).with_name(RESTART)).st_mtime_ns  # noqa: PTH116 - at every call
    except OSError:
        return 0


Grant: TypeAlias = Literal["authorization_code", "client_credentials"]


class OAuthConfig(Struct, frozen=True):
    """How to get the tokens of a server: by the login of a person, or by credentials of Kiwi."""

    name: str
    """What they are kept under: the server, as one manifest in one place describes it."""
    folder: Path
    """The folder of the user's state."""
    grant: Grant = "authorization_code"
    client_id: str = ""
    client_secret: str = ""
    private_key: str = ""
    """Like the secret, the name of a variable: `${NAME}`."""
    signing_algorithm: str = "ES256"
    token_auth: str = ""
    client_metadata_url: str = ""
    issuer: str = ""
    scopes: tuple[str, ...] = ()
    redirect_port: int = 0
    is_declared: bool = False
    """Whether the manifest says that tokens are needed; otherwise the server's own answer does."""


_OAUTH_TEXTS = (
    "client_id", "client_secret", "private_key", "signing_algorithm", "token_auth", "client_metadata_url", "issuer",
)  # fmt: skip


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


class ServerConfig(Struct, frozen=True):
    """One server: its identity, how it is started or reached, and its limits."""

    identity: str
    digest: str
    transport: Transport
    spec: ProcessSpec | HttpSpec
    space: Space
    """Where it is started, and where Kiwi keeps its files."""
    profile: SandboxProfile = SandboxProfile(strictest(()))
    """The sandbox of its process; the default is the strictest."""
    package: Package | None = None
    """What it is started from, where its command would fetch a package."""
    has_folder: bool = False
    """Whether its manifest names the folder that it starts in."""
    startup_timeout: float = STARTUP_TIMEOUT
    reconnect: bool = True
    reconnect_delay: float = RECONNECT_DELAY
    max_bytes: int = MAX_BYTES
    idle_timeout: float | None = None
    """How many seconds it is kept while it is not used, if its manifest says so."""
    variables: tuple[str, ...] = ()
    """Every `${NAME}` in its command, address and headers."""
    defaulted: tuple[str, ...] = ()
    """Those of them that it can do without."""
    warnings: tuple[str, ...] = ()
    oauth: OAuthConfig | None = None
    """How to get its tokens, if it can have any."""
    client: tuple[str, ...] = ()
    """What it may ask of the client that calls it, as its owner allowed it: `roots`, `sampling`, `questions`."""

    @property
    def name(self) -> str:
        """The short name of the server."""
        return self.identity.rpartition("/")[2].partition("@")[0]

    def key(self, secrets: Mapping[str, str]) -> str:
        """Return the key for sharing a connection: the server, where and how it runs, the credentials, the hosts."""
        where: Json
        match self.spec:
            case ProcessSpec(cwd=cwd):
                where = [cwd, _profile_text(self.profile)]
            case HttpSpec(granted=granted, denied=denied):
                where = [list(granted), list(denied)]
        # What a stored secret is for may be narrowed while a connection is open, which must not go on with it then.
        bounds = secrets.bounds if isinstance(secrets, Revealed) else {}
        limits: Json = [[name, list(bound.hosts), bound.form] for name, bound in sorted(bounds.items())]
        given: Json = sorted([*pair] for pair in secrets.items())
        # What a server may ask is fixed at its start, for the whole connection.
        parts: Json = [self.identity, self.digest, self.transport, where, given, limits, list(self.client)]
        return sha256(compact(parts).encode(errors="surrogatepass")).hexdigest()


@lru_cache(maxsize=256)
def _profile_text(profile: SandboxProfile) -> str:
    return compact(profile.to_json())


_servers: OrderedDict[tuple[int, Space, str], tuple[Tool, ServerConfig]] = OrderedDict()
_SERVERS_KEPT = 512


def server_of(link: Tool, space: Space) -> ServerConfig:
    """Return the server that a manifest describes, read once for as long as the catalog gives the same manifest."""
    key = (id(link), space, search_path())
    known = _servers.get(key)
    if known is None or known[0] is not link:
        known = _servers[key] = (link, _read(link, space))
        if len(_servers) > _SERVERS_KEPT:
            _servers.popitem(last=False)
    return known[1]


def _read(link: Tool, space: Space) -> ServerConfig:
    config = link.manifest.config
    transport = _SPELLINGS.get(as_text(config.get("transport")))
    if transport is None:
        fix = f"Use one of: {', '.join(_SPELLINGS)}."
        raise InvalidManifest(f"{link.id!r}", [Issue("config.transport", "is no transport that is spoken", fix)])
    limit = config.get("max_bytes")
    max_bytes = limit if isinstance(limit, int) and not isinstance(limit, bool) else MAX_BYTES
    visible: tuple[str, ...] = ()
    spec: ProcessSpec | HttpSpec
    oauth = package = None
    if transport == "stdio":
        spec, package = _process(link, space)
        words: Json = [list(spec.argv), dict(spec.env)]
        visible = variables(list(spec.argv))
    else:
        spec = _address(config, max_bytes)
        oauth = _oauth(link, space, spec) if transport in _WITH_TOKENS else None
        words = [spec.url, dict(spec.headers), list(spec.basic or ())]
        words += [oauth.client_secret, oauth.private_key] if oauth else []
    return ServerConfig(
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
        warnings=tuple(
            f"the value of {name} stands in the command line of {link.id!r}, where every user of this machine can "
            "read it; a secret belongs into `config.env`"
            for name in visible
        ),
        oauth=oauth,
    )


def _oauth(link: Tool, space: Space, spec: HttpSpec) -> OAuthConfig | None:
    """Return how to get the tokens of a server; None if its manifest says what to send instead.

    Nothing said is as good as an empty `auth`, since servers can ask later.
    """
    if spec.basic is not None or "authorization" in {name.lower() for name in spec.headers}:
        return None
    home = str(space.project_ai) if link.origin.is_in_project else ""
    auth = as_object(link.manifest.config.get("auth"))
    port = auth.get("redirect_port")
    return OAuthConfig(
        compact([home, link.identity.partition("@")[0]]),
        space.user / "state",
        **{word: text for word in _OAUTH_TEXTS if (text := as_text(auth.get(word)))},
        grant="client_credentials" if auth.get("grant") == "client_credentials" else "authorization_code",
        scopes=tuple(map(as_text, as_list(auth.get("scopes")))),
        redirect_port=port if isinstance(port, int) else 0,
        is_declared=auth.get("type") == "oauth",
    )


_PROJECT = "{project}"


def _process(link: Tool, space: Space) -> tuple[ProcessSpec, Package | None]:
    config = link.manifest.config
    own = {name: escape(value) for name, value in base_env(link, space, Environment()).items()}
    here = str(space.project)
    command = as_text(config.get("command")).replace(_PROJECT, here)
    written = [text_of(word) for word in as_list(config.get("args"))]
    found = server_package(command, written, space.cache)
    package, (command, *lead), arguments = (
        (found[0], found[0].command, found[1]) if found else (None, (command,), tuple(written))
    )
    # The program of a package is known by its whole name, and is there once the package is.
    program = command if package and "/" in command else find_program(command, search_path(), needed_by=link.id)
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
        headers={**headers, **auth_headers(auth, as_text(auth.get("token")) or as_text(auth.get("key")))},
        basic=basic_auth(auth),
        max_bytes=max_bytes,
        max_redirects=0,
    )


class ServerRequest(Struct, frozen=True):
    """One request that a server is asked: its method, and what of the server it is about."""

    method: Literal["tools/call", "prompts/get", "resources/read"]
    name: str

    def params(self, inputs: JsonObject) -> dict[str, Json]:
        """Return the request's parameters for a caller's inputs."""
        match self.method:
            case "tools/call":
                return {"name": self.name, "arguments": dict(inputs)}
            case "prompts/get":
                return {"name": self.name, "arguments": {name: text_of(value) for name, value in inputs.items()}}
            case "resources/read":
                return {"uri": self.name}


def plan_of(chain: Chain, server: ServerConfig) -> Plan:
    """Return the plan of what is done with a server itself: how it is started or reached."""
    return Plan(
        identity=chain.tool.identity,
        tool_digest=chain.tool.digest,
        driver="mcp",
        chain=tuple((link.identity, link.digest) for link in chain.links),
        spec=server.spec,
        inputs={},
        variables=server.variables,
        defaulted=server.defaulted,
        effect="idempotent",
        warnings=server.warnings,
    )


def wanted_of(chain: Chain, inputs: JsonObject) -> ServerRequest:
    """Return what an item asks of its server."""
    config = chain.tool.manifest.config
    if template := as_text(config.get("mcp_resource_uri")):
        if missing := [name for name in names_in(template) if name not in inputs]:
            fix = "Send it: the resource's address is made with it."
            raise InvalidArguments(chain.tool.id, [Issue(name, "is missing", fix) for name in missing])
        uri = expand(template, {name: text_of(value) for name, value in inputs.items()})
        return ServerRequest("resources/read", uri)
    if prompt := as_text(config.get("mcp_prompt_name")):
        return ServerRequest("prompts/get", prompt)
    return ServerRequest("tools/call", as_text(config.get("mcp_tool_name")))
