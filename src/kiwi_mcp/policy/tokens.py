"""Tokens: who may use the gateway. Each is a random text; only its hash is stored."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path
from typing import Literal

from msgspec import Struct, ValidationError, convert, field, to_builtins

from kiwi_mcp.domain.calls import IDENTITY_KINDS, IdentityKind, Principal
from kiwi_mcp.domain.errors import Conflict, InvalidRequest, KiwiError, NotFound, TokenRefused, Unavailable
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.registry import Actor, is_user_namespace
from kiwi_mcp.domain.times import moment
from kiwi_mcp.manifest.document import read_json
from kiwi_mcp.manifest.owner_file import changing
from kiwi_mcp.store.principals import token_principal

FOLDER, FILE_NAME = "state", "tokens.json"
PREFIX = "kiwi_"
_NAME = lazy_pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = lazy_pattern(r"[0-9a-f]{64}")
_ID = 8
"""How much of its hash tells a token from others of its name, in digits."""
_MAX_TOKENS = 1_000
_KINDS: Mapping[str, IdentityKind] = {kind: kind for kind in IDENTITY_KINDS if kind != "thread"}
"""The kinds of identity that a token may have: threads have rights of their own, and no token."""


class GatewayToken(Struct, frozen=True):
    """The user of a token: a name for people, their namespaces and their rights. The file has a row of each."""

    name: str
    namespaces: tuple[str, ...]
    sha256: str
    right: Literal["read", "write"] = "read"
    created_at: str = ""
    can_use_tools: bool = field(default=False, name="tools")
    can_author: bool = field(default=False, name="author")
    """Whether they may change items here, where they may use tools."""
    kind: IdentityKind = field(default="agent", name="as")
    """What they are for the rules; the answers of an owner are the owner's own."""
    can_manage: bool = field(default=False, name="manage")
    """Whether the API accepts it for verbs of the owner, such as approvals and rules. No model may have it."""

    @property
    def can_write(self) -> bool:
        """Whether they may publish to their namespaces."""
        return self.right == "write"

    @property
    def identity(self) -> Principal:
        """Who it is for the rules, which call it by its name."""
        return Principal(self.kind, self.name)

    @property
    def principal(self) -> str:
        """Who it is, in records and for whatever belongs to them: never the same as another token of the name."""
        return token_principal(self.name, self.sha256[:_ID])

    @property
    def actor(self) -> Actor:
        """The actor that uses a registry."""
        return Actor(self.name, self.namespaces)

    def to_json(self) -> JsonObject:
        """Return the token as lists show it: without its hash."""
        row: dict[str, Json] = to_builtins(self)
        del row["sha256"]
        return {**row, "principal": self.principal}


class _TokenFile(Struct):
    tokens: tuple[GatewayToken, ...] = ()


class TokenStore:
    """The tokens of one user space, read again whenever their file has changed: one that is removed ends at once."""

    def __init__(self, user: Path) -> None:
        self._path = user / FOLDER / FILE_NAME
        self._stat: tuple[int, int, int] | None = None
        self._known: Sequence[GatewayToken] = ()

    def all(self) -> Sequence[GatewayToken]:
        """Return every token."""
        if (stat := self._state()) != self._stat:
            self._known, self._stat = (_parse(self._path) if stat else ()), stat
        return self._known

    def find(self, secret: str) -> GatewayToken | None:
        """Return the token with this secret. All are compared in constant time, so that timing reveals nothing."""
        given, found = sha256(secret.encode(errors="replace")).hexdigest(), None
        for token in self.all():
            found = token if compare_digest(token.sha256, given) else found
        return found

    def identify(self, secret: str) -> Principal:
        """Return the principal of a token; refuse an unknown token."""
        if (token := self.find(secret)) is None:
            raise TokenRefused("The token is not valid here.", suggestion="Ask the owner: `kiwi up token add NAME`.")
        return token.identity

    def holds(self, principal: str) -> bool:
        """Whether the token of a principal is still one."""
        return any(token.principal == principal for token in self.all())

    def add(
        self,
        name: str,
        namespaces: Sequence[str],
        *,
        can_write: bool,
        can_use_tools: bool = False,
        can_author: bool = False,
        kind: str = "agent",
        can_manage: bool = False,
    ) -> str:
        """Make a token and return it; it is shown this once, and kept nowhere."""
        if not _NAME.fullmatch(name) or not all(map(is_user_namespace, namespaces)):
            raise InvalidRequest(
                "A token has a name, and namespaces that people publish to.",
                suggestion="Use letters, digits, `.`, `_` and `-`; `kiwi` is for what ships with Kiwi.",
            )
        if can_write and not namespaces:
            raise InvalidRequest("A token that writes needs a namespace.", suggestion="Add `--namespaces acme`.")
        if (known := _KINDS.get(kind)) is None:
            raise InvalidRequest(f"{kind!r:.40} is not a token kind.", suggestion=f"Use one of: {', '.join(_KINDS)}.")
        if can_author and not can_use_tools:
            raise InvalidRequest("Who makes tools may use them too.", suggestion="Add `--tools`.")
        if can_manage and not (known == "owner" and can_use_tools):
            raise InvalidRequest(
                "Only a token of the owner that may use tools can manage.", suggestion="Leave out `--as`."
            )
        secret = f"{PREFIX}{secrets.token_urlsafe(32)}"
        with self._changing() as tokens:
            if any(token.name == name for token in tokens):
                raise Conflict(f"There is a token {name!r} already.", suggestion="Remove it first, or choose a name.")
            if len(tokens) >= _MAX_TOKENS:
                raise InvalidRequest(f"There are {_MAX_TOKENS:,} tokens.", suggestion="Remove those not in use.")
            spaces, hashed = tuple(dict.fromkeys(namespaces)), sha256(secret.encode()).hexdigest()
            rights = can_use_tools, can_author, known, can_manage
            tokens.append(GatewayToken(name, spaces, hashed, "write" if can_write else "read", moment(), *rights))
        return secret

    def remove(self, name: str) -> None:
        """Remove a token; it is refused from now on."""
        with self._changing() as tokens:
            if all(token.name != name for token in tokens):
                raise NotFound(f"There is no token {name!r}.", suggestion="List them with `kiwi up token list`.")
            tokens[:] = [token for token in tokens if token.name != name]

    def _state(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(self._path, error.strerror or "it cannot be opened") from error
        if found.st_mode & 0o022 or found.st_uid not in {os.geteuid(), 0}:
            raise _unreadable(self._path, "others may write to it")
        return found.st_mtime_ns, found.st_size, found.st_ino

    @contextmanager
    def _changing(self) -> Iterator[list[GatewayToken]]:
        """Yield the tokens to change, and store them if nothing went wrong; one process at a time."""
        with changing(self._path) as replace:
            tokens = list(_parse(self._path) if self._state() else ())
            yield tokens
            rows: list[Json] = [{**token.to_json(), "sha256": token.sha256} for token in tokens]
            replace(json.dumps({"tokens": rows}, indent=2).encode())


def _parse(path: Path) -> Sequence[GatewayToken]:
    try:
        value = read_json(path.read_text(encoding="utf-8"), what=FILE_NAME, max_bytes=4_000_000).value
    except (OSError, UnicodeDecodeError, KiwiError) as error:
        raise _unreadable(path, "it is no JSON file that can be read") from error
    try:
        tokens = convert(value, _TokenFile).tokens
    except ValidationError as error:
        raise _unreadable(path, str(error)) from error
    for one in tokens:
        # A row that is not valid would admit or lock out a person by mistake: refuse all.
        is_known = one.kind in _KINDS and _HASH.fullmatch(one.sha256) and (one.kind == "owner" or not one.can_manage)
        if not _NAME.fullmatch(one.name) or not is_known or not all(map(is_user_namespace, one.namespaces)):
            raise _unreadable(path, "one of its tokens is not complete")
    return tokens


def _unreadable(path: Path, reason: str) -> Unavailable:
    return Unavailable(
        f"The tokens cannot be used: {reason} ({path}).",
        suggestion="Make it a file that only you can write (`chmod 600`), or delete it and add tokens again.",
    )
