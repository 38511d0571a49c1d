"""The owner's settings of the store: its location, the actor that uses it, and which other registries are known."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.records import AuditLevel
from kiwi_mcp.domain.registry import DEFAULT_NAMESPACE, Actor, is_user_namespace
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.files import OwnerStamp, owner_stamp
from kiwi_mcp.store.open import DIALECTS

FILE_NAME = "registry.yaml"
"""The file in the user's space, which nothing but the owner's own commands write."""

Word = TypeVar("Word", bound=str)
SearchHalf = Literal["meaning", "words"]
"""How items are found: by words and meaning, or by words alone, which takes less memory."""

_WORDS = ("url", "actor", "namespaces", "remotes", "runs", "audit", "search", "remember")
_LEVELS: tuple[AuditLevel, ...] = get_args(AuditLevel)
_HALVES: tuple[SearchHalf, ...] = get_args(SearchHalf)
_NO_HALF = "is not how items are found"
_REMOTE = lazy_pattern(r"[a-z0-9][a-z0-9_-]{0,63}")
_TOKEN = lazy_pattern(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")

_SCHEMES = ("http", "https")
NO_DATABASE = (
    "Let `kiwi up` serve that registry and use its `https://` address, or push it to a folder and use that; "
    "a database that the team shares is `url:` of the registry.yaml of each member."
)
"""What to do instead of naming a database as a remote."""

_read: dict[tuple[str, str], tuple[OwnerStamp, RegistrySettings]] = {}


class RemoteSettings(Struct, frozen=True):
    """Where a remote registry is, and the variable that holds the token for it, written `${NAME}`."""

    url: str
    token: str = ""


class RegistrySettings(Struct, frozen=True):
    """What the owner chose: the store, the actor, the remotes, which runs are kept, what receipts tell, how to find."""

    url: str
    actor: Actor
    remotes: Mapping[str, RemoteSettings] = field(default_factory=lambda: MappingProxyType({}))
    run_count: int = 10_000
    run_days: int = 90
    audit: AuditLevel = "standard"
    search: SearchHalf = "meaning"
    remember: bool = True
    """Whether it is remembered which items were used after which searches."""


def registry_settings(user: Path) -> RegistrySettings:
    """Return the settings of a user space, read again only when the file changed; KIWI_REGISTRY names another store."""
    path = f"{user}/{FILE_NAME}"
    stat, named = owner_stamp(path), os.environ.get("KIWI_REGISTRY", "")
    # The same settings are the same object, so code that opened a store with them sees that it need not reopen it.
    known = _read.get((path, named))
    if known is None or known[0] != stat:
        settings = _parse(Path(path), user) if stat else _settings({}, user, [])
        known = _read[path, named] = (stat, replace(settings, url=named) if named else settings)
    return known[1]


def named_half(issues: list[Issue]) -> SearchHalf | None:
    """Return the search mode that the variable KIWI_SEARCH names; an unknown value is an issue, and returns None."""
    return _one_of(_HALVES, os.environ.get("KIWI_SEARCH") or None, "KIWI_SEARCH", _NO_HALF, issues)


def search_mode(user: Path) -> str:
    """Return how items are found, `words` or `meaning`; KIWI_SEARCH overrides the owner's file."""
    try:
        return named_half([]) or registry_settings(user).search
    except KiwiError:  # the code that needs the settings reports it
        return "meaning"


def default_url(user: Path) -> str:
    """Return where the store is unless the owner says otherwise."""
    return f"sqlite:///{user.absolute()}/state/registry.db"


def _parse(path: Path, user: Path) -> RegistrySettings:
    try:
        value = read_yaml(path.read_text(encoding="utf-8"), what=str(path)).value
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidManifest(
            str(path), [Issue("", f"cannot be read: {error}", "Make it a readable text file.")]
        ) from error
    issues: list[Issue] = []
    settings = _settings(_mapping(value, "", _WORDS, issues), user, issues)
    if issues:
        raise InvalidManifest(str(path), issues)
    return settings


def _settings(written: JsonObject, user: Path, issues: list[Issue]) -> RegistrySettings:
    runs = _mapping(written.get("runs"), "runs", ("count", "days"), issues)
    remember = written.get("remember")
    settings = RegistrySettings(
        url=_text(written, "url", issues) or default_url(user),
        actor=Actor(_text(written, "actor", issues) or _login(), _namespaces(written.get("namespaces"), issues)),
        remotes=MappingProxyType(dict(_remotes(written.get("remotes"), issues))),
        run_count=_number(runs, "count", 10_000, issues),
        run_days=_number(runs, "days", 90, issues),
        audit=_one_of(_LEVELS, written.get("audit"), "audit", "is not how much a receipt tells", issues) or "standard",
        search=_one_of(_HALVES, written.get("search"), "search", _NO_HALF, issues) or "meaning",
        remember=remember is not False,
    )
    if remember is not None and not isinstance(remember, bool):
        fix = "Write `remember: true` or `remember: false`."
        issues.append(Issue("remember", "says neither yes nor no", fix))
    return settings


def _namespaces(written: Json, issues: list[Issue]) -> tuple[str, ...]:
    if written is None:
        return (DEFAULT_NAMESPACE,)
    words = [as_text(word) for word in as_list(written)]
    fix = "Write lower-case words such as `[public, acme]`; `kiwi` is for what ships with Kiwi."
    if not words:
        issues.append(Issue("namespaces", "is not a list of names", fix))
    issues += [
        Issue("namespaces", f"{word!r} cannot be a namespace", fix) for word in words if not is_user_namespace(word)
    ]
    return tuple(words)


def _remotes(written: Json, issues: list[Issue]) -> Iterator[tuple[str, RemoteSettings]]:
    for name, entry in _mapping(written, "remotes", (), issues).items():
        words = (
            {"url": entry} if isinstance(entry, str) else _mapping(entry, f"remotes.{name}", ("url", "token"), issues)
        )
        issues += remote_issues(name, words)
        yield name, RemoteSettings(as_text(words.get("url")), as_text(words.get("token")))


def remote_issues(name: str, words: JsonObject) -> Iterator[Issue]:
    """Yield the faults of a remote in the owner's file."""
    place, token = f"remotes.{name}", words.get("token") or ""
    if not _REMOTE.fullmatch(name):
        yield Issue(place, "cannot name a remote", "Use lower-case letters, digits, `_` and `-`.")
    url = as_text(words.get("url"))
    scheme, is_address, _ = url.partition("://")
    if not url:
        yield Issue(place, "does not say where it is", "Add `url:` with a folder or an address.")
    elif is_address and scheme in DIALECTS:
        yield Issue(place, "is a database, which is not a remote", NO_DATABASE)
    elif is_address and scheme not in _SCHEMES:
        known = ", ".join(f"`{word}://`" for word in _SCHEMES)
        yield Issue(place, "has an address of a kind that no registry has", f"Use a folder, or one of {known}.")
    elif not is_address and "/" not in url and not url.startswith("oci:"):
        yield Issue(place, "is neither a folder nor an address", "Write a folder with a `/`, such as `/srv/shelf`.")
    if token and not _TOKEN.fullmatch(as_text(token)):
        # A token in a file is a secret in a file: it is named here, and lives where variables live.
        yield Issue(f"{place}.token", "is not the name of a variable", "Write it as `${TEAM_TOKEN}`.")


def _text(words: JsonObject, word: str, issues: list[Issue]) -> str:
    value = words.get(word)
    if value is not None and not as_text(value).strip():
        issues.append(Issue(word, "is not a text", f"Write `{word}:` and a word, or leave it out."))
    return as_text(value)


def _mapping(written: Json, place: str, words: tuple[str, ...], issues: list[Issue]) -> JsonObject:
    """Return a mapping of the file; where its words are known, any other is a fault, since it would mean nothing."""
    known = f"Use one of: {', '.join(words)}." if words else "Write a name, and where it is."
    if written is not None and not isinstance(written, Mapping):
        issues.append(Issue(place, "is not a mapping of words to values", known))
    found = as_object(written)
    unknown = [word for word in found if words and word not in words]
    issues += [Issue(f"{place}.{word}".lstrip("."), "is not a known key", known) for word in unknown]
    return found


def _number(words: JsonObject, word: str, default: int, issues: list[Issue]) -> int:
    value = words.get(word, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 10_000_000:  # noqa: PLR2004 - a limit
        issues.append(Issue(f"runs.{word}", "is not a number from 1 to 10,000,000", f"Write `{word}: {default}`."))
        return default
    return value


def _one_of(known: tuple[Word, ...], written: Json, place: str, reason: str, issues: list[Issue]) -> Word | None:
    found = next((one for one in known if one == written), None)
    if found is None and written is not None:
        issues.append(Issue(place, reason, f"Write one of: {', '.join(known)}."))
    return found


def _login() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid-{os.geteuid()}"
