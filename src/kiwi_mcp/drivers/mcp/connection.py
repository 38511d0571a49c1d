"""A connection to a server: one task owns it from the handshake, of either era, until it ends or fails."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from pathlib import Path
from time import time_ns

import anyio
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_METHOD_HEADER, MCP_PROTOCOL_VERSION_HEADER
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    CONNECTION_CLOSED,
    PROTOCOL_VERSION_META_KEY,
    SERVER_INFO_META_KEY,
    UNSUPPORTED_PROTOCOL_VERSION,
    DiscoverResult,
    Implementation,
    InitializeResult,
)
from mcp_types.version import (
    HANDSHAKE_PROTOCOL_VERSIONS,
    LATEST_HANDSHAKE_VERSION,
    LATEST_MODERN_VERSION,
    MODERN_PROTOCOL_VERSIONS,
)
from msgspec import Struct
from pydantic import BaseModel, ValidationError

from kiwi_mcp import __version__
from kiwi_mcp.domain.calls import NO_CALLER, Caller, unheard
from kiwi_mcp.domain.errors import Denied, InvalidRequest, KiwiError, LoginRequired, Unavailable
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.mcp import Era
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.oauth.account import NoOAuthOffered, no_login
from kiwi_mcp.drivers.mcp.rpc import (
    GRANT_OF_CAPABILITY,
    NOTE_LEVEL,
    Dispatcher,
    Envelope,
    ProgressCallback,
    RequestChannel,
)
from kiwi_mcp.drivers.mcp.server import ServerConfig, log_path, restarted_at
from kiwi_mcp.drivers.mcp.server_events import ServerEvents, apart
from kiwi_mcp.drivers.mcp.transport import LoginNeeded, ServerStreams, opened
from kiwi_mcp.manifest.mcp.launch_command import known_package
from kiwi_mcp.primitives.http.origin_client import is_login_wanted
from kiwi_mcp.primitives.process.spawn import completed
from kiwi_mcp.sandbox.command_files import ProgramFolders, is_in_any, is_too_wide, program_at
from kiwi_mcp.sandbox.levels import HOME, base_profile
from kiwi_mcp.sandbox.quarantine import Findings

_PROBE = 10.0
"""How long a server may take to answer `server/discover`, in seconds; some old ones never answer what is new."""
_SHARE = 0.4
"""How much of the time to start the probe may use up at most."""
_WHO: JsonObject = {"name": "kiwi", "version": __version__}
_CHANGES = frozenset(f"notifications/{kind}/list_changed" for kind in ("tools", "prompts", "resources"))


class ServerInfo(Struct, frozen=True):
    """What a server said about itself when the connection began."""

    era: Era
    protocol_version: str
    server_info: JsonObject
    capabilities: JsonObject
    instructions: str


async def _greet(channel: RequestChannel, server: ServerConfig, eras: dict[str, Era]) -> ServerInfo:
    """Begin a conversation in the era that both sides speak; `eras` has what each server spoke last."""
    tried: list[Era] = ["legacy", "modern"] if eras.get(server.identity) == "legacy" else ["modern", "legacy"]
    if server.transport == "sse":  # the transport is older than the new era, and some servers hang on the probe
        tried = ["legacy"]
    faults: list[Exception] = []
    for era in tried:
        try:
            found = await (_discover if era == "modern" else _initialize)(channel, server)
        except (MCPError, ValidationError, UnsupportedVersion, TimeoutError) as fault:
            # A code does not tell a connection that was closed from a refusal: older servers refuse what is new
            # with the same one. On a closed connection the other era fails at once.
            faults.append(fault)
            # A slow server that answers the probe after all is modern from then on, and says so.
            if _names_other_versions(fault) and era == "legacy" and len(tried) == len(faults):
                tried.append("modern")
        else:
            eras[server.identity] = era
            return found
    raise faults[-1]


async def _initialize(channel: RequestChannel, server: ServerConfig) -> ServerInfo:
    """Greet a server of the old era."""
    params: JsonObject = {
        "protocolVersion": LATEST_HANDSHAKE_VERSION,
        "capabilities": _capabilities(server),
        "clientInfo": _WHO,
    }
    raw = await channel.ask("initialize", params, {}, is_cancellable=False)
    # Fields of later revisions are not part of this contract.
    known = {word: value for word, value in raw.items() if word not in {"ttlMs", "cacheScope"}}
    result = InitializeResult.model_validate(known, by_name=False)
    if result.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
        raise UnsupportedVersion(f"Unsupported protocol version from the server: {result.protocol_version}")
    await channel.notify("notifications/initialized", {MCP_PROTOCOL_VERSION_HEADER: result.protocol_version})
    version = result.protocol_version
    info = _dumped(result.server_info)
    capabilities = _dumped(result.capabilities)
    return ServerInfo("legacy", version, info, capabilities, result.instructions or "")


async def _discover(channel: RequestChannel, server: ServerConfig) -> ServerInfo:
    """Greet a server of the new era; one that names other revisions is asked once more, in one that both speak."""
    with anyio.fail_after(min(_PROBE, server.startup_timeout * _SHARE)):
        try:
            raw = await _send_discover(channel, server, LATEST_MODERN_VERSION)
        except MCPError as refusal:
            named = as_list(as_object(refusal.error.data).get("supported"))
            if not _names_other_versions(refusal) or not (version := _mutual(named)):
                raise
            raw = await _send_discover(channel, server, version)
    ttl = raw.get("ttlMs")
    is_negative = isinstance(ttl, int | float) and ttl < 0
    result = DiscoverResult.model_validate({**raw, "ttlMs": 0} if is_negative else raw, by_name=False)
    if not (version := _mutual(result.supported_versions)):
        raise UnsupportedVersion(f"No mutually supported protocol version (server: {result.supported_versions})")
    try:
        info = _dumped(Implementation.model_validate((result.meta or {}).get(SERVER_INFO_META_KEY)))
    except ValidationError:  # what a server calls itself is only shown
        info = {}
    return ServerInfo("modern", version, info, _dumped(result.capabilities), result.instructions or "")


async def _send_discover(channel: RequestChannel, server: ServerConfig, version: str) -> JsonObject:
    meta: JsonObject = {
        PROTOCOL_VERSION_META_KEY: version,
        CLIENT_INFO_META_KEY: _WHO,
        CLIENT_CAPABILITIES_META_KEY: _capabilities(server),
    }
    headers = {MCP_PROTOCOL_VERSION_HEADER: version, MCP_METHOD_HEADER: "server/discover"}
    return await channel.ask("server/discover", {"_meta": meta}, headers, is_cancellable=False)


def _mutual(versions: Sequence[Json]) -> str:
    """Return the newest revision of the new era that both sides speak; empty if there is none."""
    return next((version for version in reversed(MODERN_PROTOCOL_VERSIONS) if version in versions), "")


def _capabilities(server: ServerConfig) -> JsonObject:
    """Return what the server may ask of clients, as its owner allowed it."""
    offered: JsonObject = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {"listChanged": True}}
    return {name: value for name, value in offered.items() if GRANT_OF_CAPABILITY[name] in server.client}


def _dumped(model: BaseModel) -> JsonObject:
    found: JsonObject = model.model_dump(by_alias=True, mode="json", exclude_none=True)
    return found


def _names_other_versions(fault: Exception) -> bool:
    return isinstance(fault, MCPError) and fault.code == UNSUPPORTED_PROTOCOL_VERSION


# The SDK writes what is wrong with a server to the log, with a traceback; here that is an outcome.
for _name in ("client", "mcp.client"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

CLOSE = 5.0
"""How long a conversation may take to end in peace, in seconds."""
_LAST_WORDS = 3.0
"""How long a caller waits for the reason why a conversation ended, in seconds."""


class ServerConnection:
    """A conversation that is opened when it is made; `greeted` waits until it can be used."""

    def __init__(
        self,
        server: ServerConfig,
        secrets: Mapping[str, str],
        eras: dict[str, Era],
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self.server = server
        self._secrets = secrets
        self._eras = eras
        self._on_change = on_change
        self._greeted: asyncio.Future[ServerInfo] = asyncio.get_running_loop().create_future()
        self._greeted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._closing = asyncio.Event()
        self._fault: BaseException | None = None
        self._is_late = self._has_ended = False
        self._wire: ServerStreams | None = None
        self._dispatcher: Dispatcher | None = None
        self._channel: RequestChannel | None = None
        self.events = ServerEvents(server)
        """What the server asks and logs, and the calls under way."""
        self._envelope = Envelope()
        self._is_heard = False
        self._began = time_ns()
        self._parting: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()
        self._task = asyncio.create_task(self._own(), name=f"mcp {server.name}", context=apart())

    @property
    def is_usable(self) -> bool:
        """Whether requests can be put in, now or when the greeting is over."""
        return not self._closing.is_set() and not self._task.done()

    @property
    def has_tasks(self) -> bool:
        """Whether the server knows that its calls may continue as tasks."""
        return self._envelope.has_tasks

    @property
    def is_lost(self) -> bool:
        """Whether it ended by itself."""
        return self._fault is not None or self._has_ended or self._is_late

    @property
    def heard_at(self) -> float:
        """When the server last said anything."""
        return self._dispatcher.last_heard if self._dispatcher else 0.0

    async def greeted(self) -> ServerInfo:
        """Wait for the greeting; a conversation that could not begin raises why."""
        return await asyncio.shield(self._greeted)

    async def ask(
        self,
        method: str,
        params: JsonObject,
        *,
        caller: Caller = NO_CALLER,
        progress: ProgressCallback | None = None,
        schema: Json = None,
    ) -> JsonObject:
        """Return the result of one request; what the server refuses is raised as the SDK's error.

        `schema` is the input schema of a tool, where a server wants parts of the arguments as headers too.
        """
        await self.greeted()
        if self._channel is None or not self.is_usable:
            raise await self.lost()
        headers, stamped = self._envelope.headers(method, params, schema), self._envelope.params(params, caller)
        number = self._channel.number()
        try:
            return await self._channel.ask(method, stamped, headers, number, progress=progress)
        except asyncio.CancelledError:
            self.events.leave(number)
            raise
        except MCPError as refusal:
            # Servers use the same code for faults of their own, with words of their own.
            is_closed = refusal.code == CONNECTION_CLOSED and refusal.error.message == "Connection closed"
            if self._closing.is_set() or is_closed:
                raise await self.lost() from refusal
            if is_login_wanted(refusal.error.data):
                raise LoginRequired(self.server.name, self.server.identity) from None
            raise

    async def listen(self, caller: Caller) -> None:
        """Ask a server of the old era for its log lines, once a caller listens to them."""
        greeting = await self.greeted()
        has_log = greeting.era == "legacy" and "logging" in greeting.capabilities
        if has_log and not self._is_heard and caller.note is not unheard:
            self._is_heard = True
            with suppress(MCPError):
                await self.ask("logging/setLevel", {"level": NOTE_LEVEL})

    def call_off(self, task_id: str) -> None:
        """Tell the server that no caller waits for a task any more; do not wait for its answer."""
        self.events.leave(_left(task_id))
        task = asyncio.create_task(self._call_off(task_id))
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)

    async def _call_off(self, task_id: str) -> None:
        with suppress(MCPError, KiwiError, TimeoutError):
            async with asyncio.timeout(CLOSE):
                await self.ask("tasks/cancel", {"taskId": task_id})
                self.events.answered(_left(task_id))

    async def lost(self) -> KiwiError:
        """Return why there is no conversation any more, with the server's last words."""
        await asyncio.wait({self._task}, timeout=_LAST_WORDS)
        return self.failure()

    def failure(self) -> KiwiError:
        """Return what went wrong, as far as it is known."""
        return failure_of(self.server, self._wire, self._fault, is_late=self._is_late, was_greeted=self._was_greeted)

    @property
    def _was_greeted(self) -> bool:
        return self._greeted.done() and not self._greeted.cancelled() and self._greeted.exception() is None

    def lacking(self, said: str, traffic: JsonObject) -> str:
        """Return what to type if the server fails because its sandbox does not provide something.

        `traffic` is what its process sent and received meanwhile.
        """
        rows = [row for row in map(as_object, as_list(traffic.get("hosts"))) if row.get("verdict") == "denied"]
        denied = tuple(dict.fromkeys(f"{row['host']}:{row['port']}" for row in rows))
        earlier = self._wire.refused() if self._wire is not None else ()
        return lacking(self.server, said, denied, earlier, is_silent=not traffic)

    @property
    def is_outdated(self) -> bool:
        """Whether the owner asked for a restart of the server since, or its sandbox lost a protected file meanwhile."""
        if self.server.transport != "stdio":
            return False
        is_whole = self._wire is None or self._wire.is_whole()
        return not is_whole or restarted_at(self.server.space, self.server.identity) > self._began

    def save_log(self) -> None:
        """Store the last part of what the server's process wrote to standard error, without secrets."""
        if self._wire is not None and (text := self._wire.complaints()):
            with suppress(OSError):
                path = log_path(self.server.space, self.server.identity)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.write_text(strip_controls(text), encoding="utf-8", errors="replace")

    def left(self) -> JsonObject:
        """Return what the server's process sent and received since this was asked last."""
        return self._wire.left() if self._wire is not None else {}

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Move settings of other programs that the server's process creates during the block to quarantine.

        What it commits is taken over into the owner's repository.
        """
        watch = self._wire.watch if self._wire is not None else None
        if self._wire is None or watch is None or not watch.folders:
            yield
            return
        copies = self._wire.git_copies
        try:
            for copy in copies:
                await completed(copy.refresh())
            await completed(asyncio.to_thread(watch.open_call))
            yield
        finally:
            for copy in copies:
                await completed(copy.take_over(watch.note))
            await completed(asyncio.to_thread(watch.close_call))

    def quarantined(self) -> Findings:
        """Return what was found since this was asked last."""
        watch = self._wire.watch if self._wire is not None else None
        return watch.take_news() if watch is not None else Findings()

    def notices(self) -> list[str]:
        """Return what the owner should know of the server's manners, each once."""
        found = {}
        if self._wire is not None and (noise := self._wire.noise()):
            found["noise"] = f"The server printed {noise} line(s) among its messages that are none."
        if self._dispatcher is not None and (dropped := self._dispatcher.dropped):
            found["flood"] = f"The server sent {dropped} notification(s) too many; they were dropped."
        fresh = {word: text for word, text in found.items() if word not in self._told}
        self._told |= fresh.keys()
        return list(fresh.values())

    async def aclose(self) -> None:
        """End the conversation, and everything that was started for it."""
        if self._parting:
            await asyncio.wait(self._parting)
        self._closing.set()
        if not self._was_greeted:
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSE)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE)

    async def _own(self) -> None:
        watchdog = asyncio.get_running_loop().call_later(self.server.startup_timeout, self._give_up)
        try:
            async with opened(self.server, self._secrets) as self._wire:
                channel = RequestChannel(self._wire.outgoing)
                dispatcher = self._dispatcher = Dispatcher(
                    self._wire.incoming,
                    self._wire.outgoing,
                    channel,
                    on_request=self.events.answer,
                    on_notification=self._notified,
                    on_answer=self.events.answered,
                    on_end=self._ended,
                )
                async with anyio.create_task_group() as group:
                    group.start_soon(dispatcher.run)
                    try:
                        info = await _greet(channel, self.server, self._eras)
                        watchdog.cancel()
                        self._envelope = Envelope.of(
                            info.era, info.protocol_version, _WHO, info.capabilities, self.server.client
                        )
                        self._channel = channel
                        self._greeted.set_result(info)
                        if info.era == "modern" and self._on_change is not None:
                            group.start_soon(self._listen, channel, info.capabilities)
                        await self._closing.wait()
                    finally:
                        self._closing.set()  # before any waiter is notified, so that waiters know why
                        channel.end()
                        group.cancel_scope.cancel()
        except asyncio.CancelledError:
            if not self._is_late:
                raise
        except Exception as fault:  # noqa: BLE001 - whatever it is, it is why the conversation ended
            self._fault = self._fault or fault
        finally:
            watchdog.cancel()
            self.save_log()
            self._closing.set()
            if not self._greeted.done():
                self._greeted.set_exception(self.failure())

    async def _listen(self, channel: RequestChannel, offered: JsonObject) -> None:
        """Ask a server of the new era to report changes; its reports arrive like every notification."""
        wanted = {
            f"{kind}ListChanged": True
            for kind in ("tools", "prompts", "resources")
            if as_object(offered.get(kind)).get("listChanged") is True
        }
        if wanted:
            method, params = "subscriptions/listen", self._envelope.params({"notifications": wanted})
            with suppress(MCPError):  # a server that reports nothing is listed from time to time
                await channel.ask(method, params, self._envelope.headers(method, params))

    def _give_up(self) -> None:
        self._is_late = True
        self._task.cancel()

    def _ended(self, fault: Exception | None) -> None:
        if not self._closing.is_set():
            self._has_ended = True  # why, the wire may tell when it is closed
            self._fault = self._fault or fault
            self._closing.set()

    def _notified(self, method: str, params: JsonObject, context: Context | None) -> None:
        if method == "notifications/message":
            self.events.note(params, context)
        elif method in _CHANGES and self._on_change is not None:
            self._on_change(self.server.identity)


def _left(task_id: str) -> str:
    """Return the key of an abandoned task among requests; it cannot equal a request number."""
    return f"task {task_id}"


_MOST_WORDS = 4
_PATH = re.compile(r"(?<![\w:/.])(/[^\s'\":,;()<>|*?\[\]]{2,400})")
_ABSENT = re.compile(
    r"(?i)no such file|does not exist|not found|enoent|no module named|cannot find|permission denied|eacces|eperm"
)
_FIXED = re.compile(r"(?i)read-?only file ?system|erofs|readonly database")
_UNREACHED = re.compile(
    r"(?i)enotfound|eai_again|econnrefused|enetunreach|getaddrinfo|name or service not known|name resolution"
    r"|unreachable|fetch failed|proxy|not permitted|cannot connect|connection refused|connecterror|failed to resolve"
    r"|connection (?:issue|error)|could ?n[o']t connect|err_(?:name_not_resolved|internet_disconnected|tunnel\w*)"
    r"|max retries exceeded|all connection attempts failed|network (?:is )?(?:error|unavailable)"
)
_NO_SOCKETS = "address family not supported"
_HOST = re.compile(
    r"(?im)(?:https?://|wss?://|getaddrinfo \w+ |resolve '|host[=:] ?'?|^)((?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d{1,5})?)"
)
_OURS = (f"{HOME}/", "/proc/", "/dev/", "/sys/", "/etc/")
"""Where every sandbox has files of its own."""
_WEB_PORT = re.compile(r":(?:80|443)$")


def lacking(
    server: ServerConfig, said: str, denied: Sequence[str] = (), earlier: Sequence[str] = (), *, is_silent: bool = False
) -> str:
    """Return what to type if a server seems to fail because it lacks a path or a host; else nothing.

    `said` is its last output, `denied` are the hosts that the proxy denied meanwhile, `earlier` those before that.
    `is_silent` says that nothing was sent through the proxy.
    """
    if server.transport != "stdio" or server.profile.level in {"trusted", "standard"}:
        return ""
    is_unreached = _UNREACHED.search(said) is not None
    hosts = [*denied] or ([*_hosts(server, said, earlier)] if is_unreached else [])
    words = [*_paths(server, said), *(f"--host {shlex.quote(_WEB_PORT.sub('', host))}" for host in hosts)]
    more = ""
    if _NO_SOCKETS in said.lower() and not server.profile.has_sockets:
        words.append("--unix-sockets")
    if not words and is_unreached and not server.profile.hosts:
        words, more = ["--host HOST"], " (HOST as in api.example.com; '*' is any public host)"
    if not words and is_unreached and is_silent and server.package and server.package.kind == "node":
        return (
            "Node before version 22.21 does not use the proxy of its sandbox: install a newer one (`node --version`)."
        )
    if not words:
        return ""
    listed = " ".join(dict.fromkeys(words[:_MOST_WORDS]))
    command = f"kiwi mcp allow {server.name} {listed}"
    return f"Its sandbox allows only what its owner allowed. To allow this: `{command}`{more}."


def _paths(server: ServerConfig, said: str) -> Iterator[str]:
    """Yield the paths of this machine that a server mentions and may not access."""
    is_fixed = _FIXED.search(said) is not None
    if not is_fixed and not _ABSENT.search(said):
        return
    seen = (*server.profile.readable, *server.profile.writable)
    if isinstance(server.spec, ProcessSpec):
        # What the program brings with it is not what is missing.
        program = shutil.which(server.spec.argv[0], path=server.spec.env.get("PATH"))
        around = ProgramFolders(trusted=(str(server.space.cache), sys.prefix, sys.base_prefix))
        seen += program_at(program, base_profile().covers, around).roots if program else ()
    for text in dict.fromkeys(_PATH.findall(said)):
        path = Path(os.path.realpath(text.rstrip(".")))
        if ".git" in path.parts:  # what a git server writes is given with its repository
            path = Path(*path.parts[: path.parts.index(".git")])
        # What is nowhere is to be made, which takes the folder around it.
        is_made = is_fixed or not path.exists()
        wanted = path.parent if is_made and not path.is_dir() else path
        if _may_be_given(wanted, server) and not is_in_any(wanted, server.profile.writable if is_made else seen):
            yield f"{'--write' if is_made else '--read'} {wanted}"


def _may_be_given(path: Path, server: ServerConfig) -> bool:
    """Whether a path is there, and is neither of every sandbox's own nor Kiwi's, nor as wide as a home."""
    space = server.space
    is_own = any(path.is_relative_to(own.resolve()) for own in (space.cache, space.user, space.memory))
    is_everywhere = f"{path}/".startswith(_OURS) or base_profile().covers(str(path))
    return path.exists() and not is_own and not is_everywhere and not is_too_wide(path)


def _hosts(server: ServerConfig, said: str, earlier: Sequence[str]) -> Iterator[str]:
    """Yield the hosts that a server names in its complaint; else those denied before, or that it is known to need."""
    named = [host.lower() for host in _HOST.findall(said)]
    known = known_package(server.package.kind, server.package.wanted[0]) if server.package else None
    needed = [host for host in (known.hosts if known else ()) if host not in server.profile.hosts]
    yield from named or earlier or needed


QUOTED = 4_000
"""The most of a server's last words that an error quotes, in characters."""
_LINE = 300


class UnsupportedVersion(Exception):
    """A server speaks no revision of the protocol that Kiwi speaks."""


def failure_of(
    server: ServerConfig, wire: ServerStreams | None, fault: BaseException | None, *, is_late: bool, was_greeted: bool
) -> KiwiError:
    """Return why there is no conversation with a server."""
    root = _root(fault)
    if isinstance(root, Denied | InvalidRequest):  # nothing was sent, so there is nothing else to tell
        return root
    if isinstance(root, LoginNeeded) or (isinstance(root, MCPError) and is_login_wanted(root.error.data)):
        return LoginRequired(server.name, server.identity)
    if isinstance(root, NoOAuthOffered):
        return no_login(server.name)
    complaints = strip_controls(wire.complaints())[-QUOTED:].strip() if wire else ""
    said = f" It said: {complaints.splitlines()[-1].strip()[:_LINE]}" if complaints else ""
    what = "ended" if was_greeted else "did not start"
    reason = _reason(server, wire, root, is_late=is_late)
    return Unavailable(
        f"The MCP server {server.name!r} {what}: {reason}.{said}",
        suggestion=_suggestion(server, wire, root, is_late=is_late),
        server=server.identity,
        **({"stderr": complaints} if complaints else {}),
        **(root.details if isinstance(root, KiwiError) else {}),
    )


def _reason(server: ServerConfig, wire: ServerStreams | None, root: BaseException | None, *, is_late: bool) -> str:
    if is_late:
        return f"it did not greet within {server.startup_timeout:g} seconds"
    match root:
        case KiwiError():
            return strip_controls(root.message).rstrip(".")
        case MCPError() if root.code != CONNECTION_CLOSED:
            return f"it refused the greeting ({root.code}: {strip_controls(str(root))[:_LINE]})"
        case ValidationError():
            return "its greeting is not one of this protocol"
        case UnsupportedVersion():
            return strip_controls(str(root))[:_LINE]
        case _:
            return (wire.ending() if wire else "") or "it ended the connection"


def _suggestion(server: ServerConfig, wire: ServerStreams | None, root: BaseException | None, *, is_late: bool) -> str:
    if wire is not None and (remedy := lacking(server, strip_controls(wire.complaints()), wire.refused())):
        return remedy
    if is_late:
        return "Give it a longer `startup_timeout`, or run its command by hand to see what it waits for."
    if isinstance(root, KiwiError) and root.suggestion:
        return root.suggestion
    if server.transport == "stdio":
        level = server.profile.level
        note = f" It runs in a sandbox ({level}): `kiwi help mcp`." if level != "trusted" else ""
        return f"Run its command by hand to see its output; it is started again at the next call.{note}"
    return "Check that the server is running and that its url is right; it is tried again at the next call."


def _root(fault: BaseException | None) -> BaseException | None:
    """Return the first fault within groups of them, those that say more before those that say less."""
    if not isinstance(fault, BaseExceptionGroup):
        return fault
    found = [_root(inner) for inner in fault.exceptions]
    return next((one for one in found if isinstance(one, KiwiError)), found[0])
