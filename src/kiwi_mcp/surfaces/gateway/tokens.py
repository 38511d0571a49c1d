"""Tokens: who may use the gateway. Each is a random word, of which only the hash is kept."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from kiwi_mcp.domain.errors import Conflict, InvalidRequest, KiwiError, NotFound, TokenRefused, Unavailable
from kiwi_mcp.domain.identity import IDENTITY_KINDS, Identity, IdentityKind
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.domain.times import moment
from kiwi_mcp.kernel.private_file import changing
from kiwi_mcp.kernel.settings import is_namespace
from kiwi_mcp.manifest.json_text import read_json
from kiwi_mcp.store.whose import token_principal

FOLDER, FILE_NAME = "state", "tokens.json"
PREFIX = "kiwi_"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_ID = 8
"""How much of its hash tells a token from others of its name, in digits."""
_MAX_TOKENS = 1_000
_KINDS: Mapping[str, IdentityKind] = {kind: kind for kind in IDENTITY_KINDS if kind != "thread"}
"""What a token may stand for: threads have rights of their own, and no token."""


@dataclass(frozen=True, slots=True)
class Token:
    """Who a token stands for: a name for people, their namespaces, whether they may write, use tools and make some."""

    name: str
    namespaces: tuple[str, ...]
    can_write: bool
    sha256: str
    created_at: str
    can_use_tools: bool = False
    can_author: bool = False
    """Whether they may change items here, where they may use tools."""
    kind: IdentityKind = "agent"
    """What they are for the rules; the answers of an owner are the owner's own."""

    @property
    def identity(self) -> Identity:
        """Who it is for the rules, which call it by its name."""
        return Identity(self.kind, self.name)

    @property
    def principal(self) -> str:
        """Who it is, in records and for whatever belongs to them: never the same as another token of the name."""
        return token_principal(self.name, self.sha256[:_ID])

    @property
    def actor(self) -> Actor:
        """The actor as whom a registry is used."""
        return Actor(self.name, self.namespaces)

    def to_json(self) -> JsonObject:
        """Return the token as lists show it: without its hash."""
        return {
            "name": self.name,
            "namespaces": list(self.namespaces),
            "right": "write" if self.can_write else "read",
            "tools": self.can_use_tools,
            "author": self.can_author,
            "as": self.kind,
            "principal": self.principal,
            "created_at": self.created_at,
        }


class Tokens:
    """The tokens of one user space, read again whenever their file has changed: one that is removed ends at once."""

    def __init__(self, user: Path) -> None:
        self._path = user / FOLDER / FILE_NAME
        self._stat: tuple[int, int, int] | None = None
        self._known: Sequence[Token] = ()

    def all(self) -> Sequence[Token]:
        """Return every token."""
        if (stat := self._state()) != self._stat:
            self._known, self._stat = (_parse(self._path) if stat else ()), stat
        return self._known

    def find(self, secret: str) -> Token | None:
        """Return whose token this is. Every one is compared, each in the same time, so that nothing is told."""
        given, found = sha256(secret.encode(errors="replace")).hexdigest(), None
        for token in self.all():
            found = token if compare_digest(token.sha256, given) else found
        return found

    def identify(self, secret: str) -> Identity:
        """Return who shows a token; refuse one that is nobody's."""
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
    ) -> str:
        """Make a token and return it; it is shown this once, and kept nowhere."""
        if not _NAME.fullmatch(name) or not all(map(is_namespace, namespaces)):
            raise InvalidRequest(
                "A token has a name, and namespaces that people publish to.",
                suggestion="Use letters, digits, `.`, `_` and `-`; `kiwi` is for what ships with Kiwi.",
            )
        if can_write and not namespaces:
            raise InvalidRequest("A token that writes needs a namespace.", suggestion="Add `--namespaces acme`.")
        if (known := _KINDS.get(kind)) is None:
            raise InvalidRequest(f"{kind!r:.40} is nobody's kind.", suggestion=f"Use one of: {', '.join(_KINDS)}.")
        if can_author and not can_use_tools:
            raise InvalidRequest("Who makes tools may use them too.", suggestion="Add `--tools`.")
        secret = f"{PREFIX}{secrets.token_urlsafe(32)}"
        with self._changing() as tokens:
            if any(token.name == name for token in tokens):
                raise Conflict(f"There is a token {name!r} already.", suggestion="Remove it first, or choose a name.")
            if len(tokens) >= _MAX_TOKENS:
                raise InvalidRequest(f"There are {_MAX_TOKENS:,} tokens.", suggestion="Remove those not in use.")
            hashed = sha256(secret.encode()).hexdigest()
            rights = can_use_tools, can_author
            tokens.append(Token(name, tuple(dict.fromkeys(namespaces)), can_write, hashed, moment(), *rights, known))
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
    def _changing(self) -> Iterator[list[Token]]:
        """Give the tokens to change, and keep them if nothing went wrong; one process at a time."""
        with changing(self._path) as replace:
            tokens = list(_parse(self._path) if self._state() else ())
            yield tokens
            rows: list[Json] = [{**token.to_json(), "sha256": token.sha256} for token in tokens]
            replace(json.dumps({"tokens": rows}, indent=2).encode())


def _parse(path: Path) -> Sequence[Token]:
    try:
        value = read_json(path.read_text(encoding="utf-8"), what=FILE_NAME, max_bytes=4_000_000).value
    except (OSError, UnicodeDecodeError, KiwiError) as error:
        raise _unreadable(path, "it is no JSON file that can be read") from error
    return tuple(_token(as_object(row), path) for row in as_list(as_object(value).get("tokens")))


def _token(row: JsonObject, path: Path) -> Token:
    namespaces = tuple(as_text(word) for word in as_list(row.get("namespaces")))
    token = Token(
        name=as_text(row.get("name")),
        namespaces=namespaces,
        can_write=row.get("right") == "write",
        sha256=as_text(row.get("sha256")),
        created_at=as_text(row.get("created_at")),
        can_use_tools=row.get("tools") is True,
        can_author=row.get("author") is True,
        kind=_KINDS.get(as_text(row.get("as", "agent")), "thread"),
    )
    # A line that is not understood is a person who is let in or locked out by mistake: refuse all.
    is_known = token.kind in _KINDS and _HASH.fullmatch(token.sha256)
    if not _NAME.fullmatch(token.name) or not is_known or not all(map(is_namespace, namespaces)):
        raise _unreadable(path, "one of its tokens is not complete")
    return token


def _unreadable(path: Path, reason: str) -> Unavailable:
    return Unavailable(
        f"The tokens cannot be used: {reason} ({path}).",
        suggestion="Make it a file that only you can write (`chmod 600`), or delete it and add tokens again.",
    )
