"""A plan: exactly what a call will do. It has names in place of secrets, so it can be shown, hashed and stored."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Literal

from msgspec import Struct, field

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.json import Json, JsonObject

REPEATABLE = ("pure", "idempotent")
"""The effects of calls that may run again after a process died in them."""


class ProcessSpec(Struct, frozen=True):
    """One process to start. `argv` never holds a secret; `env` values may hold `${NAME}`."""

    argv: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    timeout: float = 300.0
    output_limit: int = 1_000_000
    """The most that is kept of each of stdout and stderr, in bytes."""
    result_limit: int = 16_000_000
    """The most that may come through the result channel, in bytes."""

    def to_json(self) -> JsonObject:
        """Return the process as a plan shows it: its input as a hash, since it may be large."""
        return {
            "primitive": "subprocess",
            "argv": list(self.argv),
            "cwd": self.cwd,
            "env": dict(self.env),
            "stdin_sha256": sha256(self.stdin).hexdigest(),
            "timeout": self.timeout,
        }


class Retry(Struct, frozen=True):
    """The retry rule of a request: number, statuses and delay."""

    attempts: int = 1
    statuses: tuple[int, ...] = (429, 502, 503, 504)
    delay: float = 0.5
    max_delay: float = 30.0


class HttpSpec(Struct, frozen=True):
    """One request. `url`, `headers` and `body` may hold `${NAME}`."""

    method: str
    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Json = None
    """A JSON value, sent as JSON, or as a form where the content type says so; a string is sent as it is."""
    has_body: bool = False
    data: bytes = b""
    """Bytes that are sent as they are instead of `body`. Kiwi's own requests have them, those of a plan never."""
    timeout: float = 30.0
    max_bytes: int = 16_000_000
    max_redirects: int = 5
    retry: Retry = Retry()
    is_repeatable: bool = True
    """Whether it may be sent again although it may have been done; without that, only what was surely not done is."""
    stream: Literal["", "sse", "lines", "websocket"] = ""
    max_events: int = 1_000
    idle: float = 60.0
    """How long a stream may be silent, in seconds, where `timeout` is not shorter."""
    basic: tuple[str, str] | None = None
    """User name and password for basic authentication, as templates like the headers."""
    granted: tuple[str, ...] = ()
    """Hosts (`name`, `name:port`, `*.name`, an address) the owner granted although they are not public."""
    denied: tuple[str, ...] = ()
    """Hosts the owner denies, checked again at every hop."""

    def to_json(self) -> JsonObject:
        """Return the request as a plan shows it."""
        return {
            "primitive": "http_client",
            "method": self.method,
            "url": self.url,
            "headers": dict(self.headers),
            "body": self.body,
            "timeout": self.timeout,
            "retry": self.retry.attempts,
            "stream": self.stream,
            "basic": list(self.basic) if self.basic else None,
            "granted": list(self.granted),
        }


class ReadSpec(Struct, frozen=True):
    """One file of an item to read; nothing runs."""

    path: str
    sha256: str

    def to_json(self) -> JsonObject:
        """Return the read as a plan shows it."""
        return {"primitive": None, "path": self.path, "sha256": self.sha256}


class ChangeSpec(Struct, frozen=True):
    """One change of a file of the owner's, shown before it is made. In the memory nothing runs for it."""

    path: str
    version: str
    """The version of the file before the change."""
    diff: str
    asks_always: bool = False
    """Whether no rule answers for the owner."""

    def to_json(self) -> JsonObject:
        """Return the change as a plan shows it."""
        return {"primitive": None, "path": self.path, "version": self.version, "diff": self.diff}


class Plan(Struct, frozen=True):
    """What a call will do: which identity, through which driver, by which single act of a primitive.

    `inputs` are the caller's parameters after defaults; `facts` are the driver's own notes on how to prepare
    (an environment to have, a build to make), as JSON so that they are part of the digest.
    """

    identity: str
    tool_digest: str
    driver: str
    chain: tuple[tuple[str, str], ...]
    """Identity and digest of every link, top to bottom."""
    spec: ProcessSpec | HttpSpec | ReadSpec | ChangeSpec
    inputs: JsonObject
    variables: tuple[str, ...] = ()
    """Every `${NAME}` the plan uses."""
    defaulted: tuple[str, ...] = ()
    """Those of them that it can do without."""
    facts: JsonObject = field(default_factory=dict)
    profile: SandboxProfile | None = None
    """The sandbox profile of its process; None if it starts no process."""
    effect: str = "at_most_once"
    only_reads: bool = False
    """Whether a server only reads for this plan, which its driver knows and no author can claim. It is not shown."""
    warnings: tuple[str, ...] = ()
    change: ChangeSpec | None = None
    """The one file that a tool of Kiwi's own changes, which the owner sees as a difference."""

    def to_json(self) -> JsonObject:
        """Return the plan as it is shown, hashed and stored."""
        return {
            "identity": self.identity,
            "digest": self.tool_digest,
            "driver": self.driver,
            "chain": [{"identity": identity, "digest": digest} for identity, digest in self.chain],
            "spec": self.spec.to_json(),
            "inputs": self.inputs,
            "variables": list(self.variables),
            "facts": self.facts,
            "jail": self.profile.to_json() if self.profile else None,
            "effect": self.effect,
        }
