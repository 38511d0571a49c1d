"""The gateway's settings: which identity provider vouches for people, and for which address of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.manifest.yaml import read_yaml

FILE_NAME = "gateway.yaml"
"""The file in the user's space, which the owner writes; options of `kiwi up` go before it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SCOPE = "kiwi:tools"
WELL_KNOWN = "/.well-known/oauth-protected-resource"

_WORDS = ("issuer", "audience", "scope")
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")
"""A scope as RFC 6749 has it."""


class IdentityProvider(Struct, frozen=True):
    """The access tokens that are accepted: of this issuer, for our audience, with the scope that allows tools."""

    issuer: str
    audience: str
    scope: str = SCOPE

    @property
    def metadata_url(self) -> str:
        """Where clients read which issuer to go to: the place that RFC 9728 derives from the audience."""
        parts = urlsplit(self.audience)
        return f"{parts.scheme}://{parts.netloc}{WELL_KNOWN}{parts.path.rstrip('/')}"

    @property
    def metadata(self) -> JsonObject:
        """What they read there."""
        return {
            "resource": self.audience,
            "resource_name": "Kiwi",
            "authorization_servers": [self.issuer],
            "scopes_supported": [self.scope],
            "bearer_methods_supported": ["header"],
        }

    @property
    def host(self) -> str:
        """The name under which clients reach us."""
        return urlsplit(self.audience).hostname or ""


def oauth_settings(user: Path, *, issuer: str = "", audience: str = "", scope: str = "") -> IdentityProvider | None:
    """Return the identity provider that the options or the owner's file name; None if there is none."""
    given = {"issuer": issuer, "audience": audience, "scope": scope}
    words = {**_written(user / FILE_NAME), **{word: text for word, text in given.items() if text}}
    if not words:
        return None
    if issues := list(_issues(words)):
        response = "; ".join(f"{issue.place} {issue.reason}" for issue in issues)
        raise InvalidRequest(
            f"The identity provider cannot be used: {response}.",
            suggestion=issues[0].fix,
            issues=[issue.to_json() for issue in issues],
        )
    return IdentityProvider(words["issuer"], words["audience"], words.get("scope") or SCOPE)


def is_secure(url: str) -> bool:
    """Whether data from an address is safe from changes in transit: by TLS, or because it is on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)


def _issues(words: Mapping[str, str]) -> Iterator[Issue]:
    for word, what in (("issuer", "of the identity provider"), ("audience", "at which clients reach `/mcp` here")):
        if not (url := words.get(word, "")):
            yield Issue(word, "is missing", f"Give `--{word} URL`: the address {what}.")
        elif not _is_address(url):
            fix = "Write `https://name/path`, without a query; plain `http` is for this machine alone."
            yield Issue(word, f"{url[:100]!r} is not an address {what}", fix)
    if not _SCOPE.fullmatch(words.get("scope") or SCOPE):
        yield Issue("scope", "is not one word", f"Write one such as `{SCOPE}`.")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False
    is_quoted = url.isascii() and url.isprintable() and not set(url) & set('?#"\\ ')
    return is_plain and is_quoted and is_secure(url)


def _written(path: Path) -> Mapping[str, str]:
    try:
        # The users that may write this file decide who may use the tools.
        state = path.stat()
        is_private = not state.st_mode & 0o022 and state.st_uid in {os.geteuid(), 0}
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(f"cannot be read: {error}", "Make it a text file that you can read.") from error
    if not is_private:
        raise _unreadable("may be written by others", "Make it yours alone: `chmod 600`.")
    written, known = as_object(value), f"Use one of: {', '.join(_WORDS)}."
    issues = [Issue(word, "is not a known key", known) for word in written if word not in _WORDS]
    issues += [Issue(word, "is not a text", known) for word in _WORDS if word in written and not as_text(written[word])]
    if issues or (value is not None and not isinstance(value, Mapping)):
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues or [Issue("", "is not a mapping", known)])
    return {word: as_text(written[word]) for word in written}


def _unreadable(reason: str, fix: str) -> InvalidManifest:
    return InvalidManifest(f"The owner's {FILE_NAME}", [Issue("", reason, fix)])
