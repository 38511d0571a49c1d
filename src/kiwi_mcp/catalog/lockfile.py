"""`kiwi.lock`."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct, UnsetType, ValidationError, convert, field
from msgspec.structs import asdict

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import Conflict, InvalidManifest, draw
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, as_object
from kiwi_mcp.manifest.document import read_json
from kiwi_mcp.manifest.files import MISSING, FileStamp, read_file, settled, stamp_of

NAME = "kiwi.lock"
"""The lockfile's name in a `.ai` folder."""

_FORMAT = "kiwi.lock/1"
_MAX_BYTES = 64_000_000
_WAIT = 10.0
_known: dict[Path, tuple[FileStamp, Lock]] = {}
Row = TypeVar("Row")
SignerKind: TypeAlias = Literal["owner", "publisher"]
_SIGNERS: Mapping[str, SignerKind] = {"owner": "owner", "verified": "publisher"}
"""Who signed a tool, by its `trust`."""


class LockedLink(Struct, frozen=True):
    """One link as it was recorded."""

    tool_id: Annotated[str, Meta(min_length=1)]
    version: str
    digest: Annotated[str, Meta(min_length=1)]
    source: str

    def __str__(self) -> str:
        return f"{self.version} sha256:{self.digest[:12]}…"


class SignedBy(Struct, frozen=True):
    """Who had signed a tool when it was recorded."""

    who: SignerKind
    key: str = ""
    """The fingerprint of the key; empty where the owner signed without one."""

    @classmethod
    def of(cls, tool: Tool) -> SignedBy | None:
        """Return who has signed a tool now, with a trusted key; None if it has no such signature."""
        who = _SIGNERS.get(tool.trust)
        return cls(who, tool.signer) if who else None

    def __str__(self) -> str:
        return f"{'the owner' if self.who == 'owner' else 'its publisher'}{f' ({self.key})' if self.key else ''}"

    def is_lost(self, tool: Tool, digest: str) -> bool:
        """Whether a tool, which had that digest, has less than this signature now."""
        is_same = tool.digest == digest and self.key in {"", tool.signer}
        return not is_same and _SIGNERS.get(tool.trust) not in {"owner", self.who}


class LockRow(Struct, frozen=True):
    """One tool as the lockfile holds it; the version and digest beside its chain are for readers."""

    chain: Annotated[tuple[LockedLink, ...], Meta(min_length=1)]
    signed_by: SignedBy | UnsetType = UNSET


class Lock(Struct, frozen=True):
    """What a lockfile records: for each tool, by source and name, its chain from top to bottom, and who signed it."""

    tools: Mapping[str, tuple[LockedLink, ...]] = field(default_factory=dict)
    signed_by: Mapping[str, SignedBy] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Return the content of a lockfile, empty if there is none; refuse a damaged one."""
        if stamp_of(str(path)) == MISSING:
            return cls()
        text = read_file(path, limit=_MAX_BYTES).data.decode(errors="replace")
        value = as_object(read_json(text, what=str(path), max_bytes=_MAX_BYTES, max_nodes=5_000_000).value)
        if value.get("lockfile") != _FORMAT:
            raise _damaged(path, f"it does not say `lockfile: {_FORMAT}`")
        rows = {key: _row(path, key, row) for key, row in as_object(value.get("tools")).items()}
        signers = {key: row.signed_by for key, row in rows.items() if isinstance(row.signed_by, SignedBy)}
        return cls({key: row.chain for key, row in rows.items()}, signers)

    def is_recorded(self, chain: Chain) -> bool:
        """Whether the tool on top of the chain was ever recorded."""
        return self._recorded(chain.tool) is not None

    def signer(self, tool: Tool) -> SignedBy | None:
        """Return the owner or the publisher who signed a tool when it was recorded; None where neither did."""
        return self.signed_by.get(_key(tool))

    def lost_signature(self, tool: Tool) -> SignedBy | None:
        """Return the signature that a tool had when it was recorded, where it has less than that now."""
        signer = self.signer(tool)
        return signer if signer and signer.is_lost(tool, self.tools[_key(tool)][0].digest) else None

    def changes(self, chain: Chain) -> tuple[str, ...]:
        """Return in plain words how a chain differs from what was recorded; nothing where it was not recorded."""
        recorded = self._recorded(chain.tool)
        now = links_of(chain)
        if recorded is None or recorded == now:
            return ()
        was = {link.tool_id: link for link in recorded}
        changed = [_change(was[link.tool_id], link) for link in now if was.get(link.tool_id, link) != link]
        names, old_names = [link.tool_id for link in now], [link.tool_id for link in recorded]
        if names != old_names:
            changed.insert(0, f"the chain was {draw(old_names)} and is now {draw(names)}")
        return tuple(changed)

    def _recorded(self, tool: Tool) -> tuple[LockedLink, ...] | None:
        # Older lockfiles record directives and knowledge by name alone.
        return self.tools.get(_key(tool)) or self.tools.get(_name(tool))

    def to_text(self) -> str:
        """Return the lockfile's text: sorted and stable, so that it reads well in a diff."""
        tools: dict[str, Json] = {
            key: {
                "version": links[0].version,
                "digest": links[0].digest,
                "chain": list(map(asdict, links)),
                **({"signed_by": asdict(by)} if (by := self.signed_by.get(key)) else {}),
            }
            for key, links in self.tools.items()
        }
        return json.dumps({"lockfile": _FORMAT, "tools": tools}, indent=2, sort_keys=True) + "\n"


def lock_at(path: Path) -> Lock:
    """Return the content of a lockfile, read again only when the file changed."""
    stamp = stamp_of(str(path))
    known = _known.get(path)
    if known is None or known[0] != stamp:
        known = _known[path] = (settled(stamp), Lock.read(path))
    return known[1]


def links_of(chain: Chain) -> tuple[LockedLink, ...]:
    """Return a chain as the lockfile records it, with what its tool names."""
    links = [(link.id, link) for link in chain.links]
    named = {f"{one.tool.item_type}/{one.tool.id}": one.tool for one in chain.references}
    return tuple(
        LockedLink(name, link.manifest.version, link.digest, link.origin.source)
        for name, link in (*links, *named.items())
    )


@lru_cache(maxsize=64)
def lock_path(space: Space, source: str) -> Path | None:
    """Return the lockfile of the items of a source; None where that has none."""
    base = {"project": space.project_ai, "user": space.user}.get(source)
    return base / NAME if base else None


def lost_signatures(links: Iterable[Tool], space: Space) -> tuple[tuple[Tool, str], ...]:
    """Return the links that have lost the signature in the lockfile of their folder, each with the expected signer."""
    paths = [(link, path) for link in links if (path := lock_path(space, link.origin.source))]
    return tuple((link, str(signer)) for link, path in paths if (signer := lock_at(path).lost_signature(link)))


def record(path: Path, chain: Chain, signed_by: SignedBy | None) -> None:
    """Write a chain and its signer into a lockfile, under a lock and in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key, links = _key(chain.tool), links_of(chain)
    with _only_writer(path.parent):
        before = Lock.read(path)
        signers = _without(before.signed_by, key) | ({key: signed_by} if signed_by else {})
        if before != (now := Lock({**before.tools, key: links}, signers)):
            _replace(path, now.to_text())


def forget(path: Path, tool: Tool) -> None:
    """Take a tool out of a lockfile, if it is in it."""
    if _key(tool) not in lock_at(path).tools:
        return
    with _only_writer(path.parent):
        before = Lock.read(path)
        _replace(path, Lock(_without(before.tools, _key(tool)), _without(before.signed_by, _key(tool))).to_text())


def forget_signer(path: Path, tool: Tool) -> None:
    """Take out of a lockfile who signed a tool: its owner wrote it anew, and has not signed it since."""
    if lock_at(path).signer(tool) is None:
        return
    with _only_writer(path.parent):
        before = Lock.read(path)
        _replace(path, Lock(before.tools, _without(before.signed_by, _key(tool))).to_text())


def _without(rows: Mapping[str, Row], key: str) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if name != key}


def _key(tool: Tool) -> str:
    # A tool and a directive may have the same name, and each has a chain of its own.
    return _name(tool) if tool.item_type == "tool" else f"{_name(tool)}#{tool.item_type}"


def _name(tool: Tool) -> str:
    return f"{tool.origin.source}/{tool.origin.namespace}/{tool.id}"


def _change(was: LockedLink, now: LockedLink) -> str:
    if (was.version, was.digest) == (now.version, now.digest):
        return f"{now.tool_id} came from {was.source} and now comes from {now.source}"
    return f"{now.tool_id} changed: {was} → {now}"


def _row(path: Path, key: str, row: Json) -> LockRow:
    try:
        return convert(row, LockRow)
    except ValidationError as error:
        raise _damaged(path, f"{key!r}: {error}") from error


def _damaged(path: Path, reason: str) -> InvalidManifest:
    fix = "Take the file back from version control, or delete it and sign the tools again."
    return InvalidManifest(str(path), [Issue("", f"it is not a lockfile: {reason}", fix)])


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    # The folder itself is locked, so that no second file is left behind.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _acquire(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, folder: Path) -> None:
    limit = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > limit:
                raise Conflict(
                    f"Another process has been writing the lockfile in {folder} for {_WAIT:.0f} seconds.",
                    suggestion="Wait for it to end, then sign again.",
                ) from error
            time.sleep(0.005)
        else:
            return


def _replace(path: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".kiwi.lock-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
