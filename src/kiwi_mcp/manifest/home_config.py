"""The owner's `config.yaml`: the settings of this machine, in four fields, without preferences and secrets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from msgspec import Struct, convert

from kiwi_mcp.domain.errors import InvalidManifest, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import DEFAULT_SOURCES
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text
from kiwi_mcp.domain.secret import looks_secret
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.files import OwnerStamp, owner_stamp
from kiwi_mcp.manifest.names import did_you_mean

FILE_NAME = "config.yaml"
_SOURCES = (*DEFAULT_SOURCES, ".claude/skills", ".agents/skills")
"""What `tool_sources` can name: with the folders in which other programs keep skills."""
_BUILT_IN = "builtin"
_NOT_FOR_MEMORY = frozenset({".ai", ".aws", ".cache", ".git", ".gnupg", ".kube", ".ssh"})
"""Folders of settings and keys: models read the whole memory."""
_read: dict[str, tuple[OwnerStamp, HomeConfig | InvalidManifest]] = {}

AuthMode = Literal["policy", "locked"]


class HomeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of this machine."""

    memory_root: str = ""
    """The real path of the folder with the memory; empty for `memory` in the user's space."""
    provider_adapter: str = ""
    """The provider of models for threads that name none."""
    auth_mode: AuthMode = "policy"
    """`policy`: the owner's rules decide; `locked`: no item runs."""
    tool_sources: tuple[str, ...] = DEFAULT_SOURCES
    """The sources of items."""


_DEFAULT = HomeConfig()
_FIELDS = HomeConfig.__struct_fields__


def home_config(user: Path) -> HomeConfig:
    """Return the choices of a user space, read again only when the file changed; refuse one with a fault."""
    path = f"{user}/{FILE_NAME}"
    stamp, known = owner_stamp(path), _read.get(path)
    if known is None or known[0] != stamp:
        try:
            known = stamp, _parsed(Path(path), user) if stamp or os.path.lexists(path) else _DEFAULT
        except InvalidManifest as fault:
            known = stamp, fault
        _read[path] = known
    if isinstance(known[1], InvalidManifest):
        raise known[1].with_traceback(None)
    return known[1]


def usable_config(user: Path) -> HomeConfig:
    """Return the choices of a user space; with a fault in the file the defaults, with which nothing runs."""
    try:
        return home_config(user)
    except InvalidManifest:  # the rights cannot be read then, and `kiwi doctor` shows what is wrong
        return _DEFAULT


def memory_folder(user: Path) -> Path:
    """Return the folder with the memory; one that the owner chose has to be there."""
    if not (chosen := home_config(user).memory_root):
        return user / "memory"
    if not Path(chosen).is_dir():
        raise Unavailable(
            f"The memory folder {chosen} is not there.",
            suggestion=f"Mount its disk, create it (`mkdir -p {chosen}`), or change `memory_root` in {FILE_NAME}.",
        )
    return Path(chosen)


def _parsed(path: Path, user: Path) -> HomeConfig:
    try:
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except (OSError, UnicodeDecodeError) as error:
        issue = Issue("", f"cannot be read: {error}", "Make it a text file that you can read.")
        raise InvalidManifest(f"The owner's {FILE_NAME}", [issue]) from error
    written, issues = as_object(value), [*_issues(value, user)]
    if issues:
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues)
    if root := as_text(written.get("memory_root")):
        written = {**written, "memory_root": "" if _is_default(root, user) else _real(root)}
    return convert(written, HomeConfig)


def _issues(value: Json, user: Path) -> Iterator[Issue]:
    known = f"Use: {', '.join(_FIELDS)}."
    if value is not None and not isinstance(value, Mapping):
        yield Issue("", "is not a mapping", known)
    for name, found in as_object(value).items():
        is_list = name == "tool_sources"
        if name not in _FIELDS:
            yield Issue(name, "is not a known key", f"{did_you_mean(name, _FIELDS)}{known}")
        elif any(looks_secret(as_text(one)) for one in (found, *as_list(found))):
            yield Issue(name, "looks like a secret", "Remove it, and keep it with `kiwi secrets set NAME`.")
        elif not (isinstance(found, list) if is_list else as_text(found)):
            yield Issue(name, "has the wrong type", "Write a list." if is_list else "Write text.")
        elif is_list:
            yield from _source_issues(as_list(found))
        elif name == "auth_mode" and found not in get_args(AuthMode):
            yield Issue(name, "is not a mode", f"Write one of: {', '.join(get_args(AuthMode))}.")
        elif name == "memory_root":
            yield from _root_issues(as_text(found), user)


def _source_issues(found: Sequence[Json]) -> Iterator[Issue]:
    known = f"Use: {', '.join(_SOURCES)}."
    for place, one in enumerate(found):
        if one not in _SOURCES:
            fix = f"{did_you_mean(as_text(one), _SOURCES)}{known}"
            yield Issue(f"tool_sources[{place}]", "is not a source of items", fix)
    if _BUILT_IN not in found:
        whole = ", ".join(dict.fromkeys((*DEFAULT_SOURCES, *(as_text(one) for one in found if one in _SOURCES))))
        fix = f"It is the whole list of sources: write `[{whole}]`, without what you want to leave out."
        yield Issue("tool_sources", f"does not name `{_BUILT_IN}`, with which every tool is run", fix)


def _root_issues(text: str, user: Path) -> Iterator[Issue]:
    """Yield why a folder cannot hold the memory."""
    fix = f"Write a folder of your own such as `~/Documents/memory`; without the field it is {user / 'memory'}."
    if not text.startswith(("/", "~/")) or not text.isprintable() or ".." in text.split("/"):
        yield Issue("memory_root", "is not an absolute path", fix)
        return
    real, own = Path(_real(text)), Path(os.path.realpath(user))
    if _is_default(text, user):
        return
    if own.is_relative_to(real):
        yield Issue("memory_root", "holds Kiwi's own folder, which is no part of the memory", fix)
    elif real.is_relative_to(own) or not _NOT_FOR_MEMORY.isdisjoint(real.parts):
        yield Issue("memory_root", f"is in {own if real.is_relative_to(own) else 'a folder of settings'}", fix)
    elif real.exists() and not real.is_dir():
        yield Issue("memory_root", "is not a folder", fix)
    elif real.exists() and real.stat().st_uid != os.geteuid():
        yield Issue("memory_root", "belongs to another user", fix)


def _real(text: str) -> str:
    return os.path.realpath(Path(text).expanduser())


def _is_default(text: str, user: Path) -> bool:
    return os.path.abspath(Path(text).expanduser()) == str(user.absolute() / "memory")  # noqa: PTH100 - as it is named
