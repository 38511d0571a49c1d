"""The lockfile: the exact chain each tool stood on when it was signed."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kiwi_mcp.catalog.files import MISSING, Stamp, read_file, settled, stamp_of
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import Conflict, InvalidManifest, draw
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.json_text import read_json

NAME = "kiwi.lock"
"""The lockfile's name in a `.ai` folder."""

_FORMAT = "kiwi.lock/1"
_MAX_BYTES = 64_000_000
_WAIT = 10.0
_known: dict[Path, tuple[Stamp, Lock]] = {}


@dataclass(frozen=True, slots=True)
class Link:
    """One link as it was recorded."""

    tool_id: str
    version: str
    digest: str
    source: str

    def to_json(self) -> JsonObject:
        """Return the link as the lockfile holds it."""
        return {"tool_id": self.tool_id, "version": self.version, "digest": self.digest, "source": self.source}

    def __str__(self) -> str:
        return f"{self.version} sha256:{self.digest[:12]}…"


@dataclass(frozen=True, slots=True)
class Lock:
    """What a lockfile records: for each tool, by source and name, its chain from top to bottom."""

    tools: Mapping[str, tuple[Link, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Return what a lockfile records, nothing where there is none; a damaged one is refused."""
        if stamp_of(str(path)) == MISSING:
            return cls()
        text = read_file(path, limit=_MAX_BYTES).data.decode(errors="replace")
        value = as_object(read_json(text, what=str(path), max_bytes=_MAX_BYTES, max_nodes=5_000_000).value)
        if value.get("lockfile") != _FORMAT:
            raise _damaged(path, f"it does not say `lockfile: {_FORMAT}`")
        return cls({key: _links(path, key, row) for key, row in as_object(value.get("tools")).items()})

    def is_recorded(self, chain: Chain) -> bool:
        """Whether the tool on top of the chain was ever recorded."""
        return _key(chain.tool) in self.tools

    def changes(self, chain: Chain) -> tuple[str, ...]:
        """Return in plain words how a chain differs from what was recorded; nothing where it was not recorded."""
        recorded = self.tools.get(_key(chain.tool))
        now = links_of(chain)
        if recorded is None or recorded == now:
            return ()
        was = {link.tool_id: link for link in recorded}
        changed = [_change(was[link.tool_id], link) for link in now if was.get(link.tool_id, link) != link]
        names, old_names = [link.tool_id for link in now], [link.tool_id for link in recorded]
        if names != old_names:
            changed.insert(0, f"the chain was {draw(old_names)} and is now {draw(names)}")
        return tuple(changed)

    def to_text(self) -> str:
        """Return the lockfile's text: sorted and stable, so that it reads well in a diff."""
        tools: dict[str, Json] = {
            key: {"version": links[0].version, "digest": links[0].digest, "chain": [link.to_json() for link in links]}
            for key, links in self.tools.items()
        }
        return json.dumps({"lockfile": _FORMAT, "tools": tools}, indent=2, sort_keys=True) + "\n"


def lock_at(path: Path) -> Lock:
    """Return what a lockfile records, read again only when the file changed."""
    stamp = stamp_of(str(path))
    known = _known.get(path)
    if known is None or known[0] != stamp:
        known = _known[path] = (settled(stamp), Lock.read(path))
    return known[1]


def links_of(chain: Chain) -> tuple[Link, ...]:
    """Return a chain as the lockfile records it."""
    return tuple(Link(link.id, link.manifest.version, link.digest, link.origin.source) for link in chain.links)


def record(path: Path, chain: Chain) -> None:
    """Write a chain into a lockfile; writers at the same time wait for each other, and readers see whole files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(path.parent):
        recorded = Lock.read(path).tools
        if recorded.get(_key(chain.tool)) != (links := links_of(chain)):
            _replace(path, Lock({**recorded, _key(chain.tool): links}).to_text())


def forget(path: Path, tool: Tool) -> None:
    """Take a tool out of a lockfile, if it is in it."""
    if _key(tool) not in lock_at(path).tools:
        return
    with _only_writer(path.parent):
        recorded = Lock.read(path).tools
        _replace(path, Lock({key: links for key, links in recorded.items() if key != _key(tool)}).to_text())


def _key(tool: Tool) -> str:
    return f"{tool.origin.source}/{tool.origin.namespace}/{tool.id}"


def _change(was: Link, now: Link) -> str:
    if (was.version, was.digest) == (now.version, now.digest):
        return f"{now.tool_id} came from {was.source} and now comes from {now.source}"
    return f"{now.tool_id} changed: {was} → {now}"


def _links(path: Path, key: str, row: Json) -> tuple[Link, ...]:
    rows = [as_object(link) for link in as_list(as_object(row).get("chain"))]
    words = [[as_text(link.get(word)) for word in ("tool_id", "version", "digest", "source")] for link in rows]
    if not words or not all(tool_id and digest for tool_id, _, digest, _ in words):
        raise _damaged(path, f"the chain of {key!r} is not a list of links")
    return tuple(Link(*link) for link in words)


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
