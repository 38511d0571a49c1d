"""Outputs: the record each run leaves as a file in the project, with retention and handles for large results."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from errno import ELOOP
from pathlib import Path
from stat import S_ISREG

from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.json import Json, JsonObject

FOLDER = "outputs/tools"
INLINE_LIMIT = 64_000
"""The largest result, in characters of JSON, that an answer carries whole."""
PREVIEW = 2_000
PAGE = 64_000
"""How much of an output one read gives at the most."""
_encode = json.JSONEncoder(ensure_ascii=False).encode
_HANDLE = re.compile(r"([a-z0-9][a-z0-9_-]{0,127})/(output_\d{8}_\d{6}(?:_\d{1,6})?)")


@dataclass(frozen=True, slots=True)
class Retention:
    """How many outputs of one tool are kept; up to a fifth more may lie there before the oldest go."""

    count: int = 50


@dataclass(frozen=True, slots=True)
class Shelf:
    """The folder of one tool's outputs, which folder it was when it was looked through, and its names, oldest first."""

    folder: str
    inode: tuple[int, int] | None
    names: list[str]


_shelves: dict[str, Shelf] = {}
_SHELVES_KEPT = 256


@dataclass(frozen=True, slots=True)
class Kept:
    """An output that was written: its path below the project, and the handle to read it again."""

    path: str
    handle: str


def keep(project_ai: Path, tool_id: str, record: JsonObject, *, now: datetime, retention: Retention) -> Kept:
    """Write a run's record under a name of its own, then drop the oldest beyond the retention."""
    shelf = _shelf(f"{project_ai}/{FOLDER}/{tool_id}", depth=FOLDER.count("/") + 2)
    name = _write_new(shelf, now.strftime("output_%Y%m%d_%H%M%S"), _lines(record))
    shelf.names.append(name)
    _prune(shelf, retention)
    return Kept(f"{project_ai.name}/{FOLDER}/{tool_id}/{name}", f"{tool_id}/{name.removesuffix('.json')}")


def _lines(record: JsonObject) -> str:
    """Return a record as JSON with a line for each of its words: readable, and quick to write."""
    words = (f"  {_encode(word)}: {_encode(value)}" for word, value in record.items())
    return "{\n" + ",\n".join(words) + "\n}\n"


def _shelf(folder: str, *, depth: int) -> Shelf:
    """Return the shelf of a tool's outputs, looked through again where the folder is not the one it was."""
    known = _shelves.get(folder)
    if known is None or known.inode != _inode(folder):
        # A project may come with links in it: written and pruned is only what really lies in its own folder.
        parts = folder.rsplit("/", depth)
        for end in range(2, depth + 2):
            if os.path.islink(part := "/".join(parts[:end])):  # noqa: PTH114 - text, as all that is on the way of a run
                raise OSError(ELOOP, f"{part} is a symbolic link, and links are not followed")
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - as above
        known = _shelves[folder] = Shelf(folder, _inode(folder), _names(folder))
        if len(_shelves) > _SHELVES_KEPT:
            del _shelves[next(iter(_shelves))]
    return known


def _inode(folder: str) -> tuple[int, int] | None:
    try:
        state = os.lstat(folder)
    except OSError:
        return None
    return state.st_dev, state.st_ino


def _names(folder: str) -> list[str]:
    names = os.listdir(folder)  # noqa: PTH208 - names are enough
    return sorted((name for name in names if name.startswith("output_")), key=_age)


def _write_new(shelf: Shelf, stem: str, text: str) -> str:
    # Two runs in one second get two names; a name that exists is never written over, nor followed if it is a link.
    # Numbers only rise: one that was freed would make the newest output look like the oldest.
    newest = shelf.names[-1] if shelf.names else ""
    for number in range(_age(newest)[1] + 1 if newest.startswith(stem) else 1, 1_000_000):
        name = f"{stem}.json" if number == 1 else f"{stem}_{number}.json"
        try:
            descriptor = os.open(f"{shelf.folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(text.encode(errors="backslashreplace"))
        return name
    raise FileExistsError(f"{shelf.folder}/{stem}")


def _prune(shelf: Shelf, retention: Retention) -> None:
    # A few at a time: putting them in order for each one would cost more than writing it.
    if len(shelf.names) <= retention.count + retention.count // 5:
        return
    names = _names(shelf.folder)
    for name in names[: max(len(names) - retention.count, 0)]:
        with suppress(FileNotFoundError):
            os.unlink(f"{shelf.folder}/{name}")  # noqa: PTH108 - as above
    shelf.names[:] = names[-retention.count :]


def _age(name: str) -> tuple[str, int]:
    stem, _, number = name.removesuffix(".json").removeprefix("output_").partition("_")
    time, _, count = number.partition("_")
    return stem + time, int(count) if count.isdecimal() else 1


def shorten(result: Json, kept: Kept | None) -> JsonObject:
    """Return the words of an answer that carry a result: whole, or a preview and a handle where it is large."""
    text = _text(result)
    if len(text) <= INLINE_LIMIT or kept is None:
        return {"result": result}
    return {
        "result": text[:PREVIEW],
        "result_is_preview": True,
        "result_handle": kept.handle,
        "result_characters": len(text),
    }


def _text(result: Json) -> str:
    """Return a result as its pages show it: a text as it is, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def read_page(project_ai: Path, handle: str, *, offset: int, length: int) -> JsonObject:
    """Return part of a stored result, by its handle."""
    found = _HANDLE.fullmatch(handle)
    if found is None:
        raise InvalidRequest(
            f"{handle!r} is not a result handle.", suggestion="Use the `result_handle` of a run as it was given."
        )
    path = project_ai / FOLDER / found[1] / f"{found[2]}.json"
    text = _text(_record(path).get("result"))
    page = text[offset : offset + min(length, PAGE)]
    end = offset + len(page)
    return {
        "handle": handle,
        "path": str(path),
        "content": page,
        "offset": offset,
        "total_characters": len(text),
        "next_offset": end if end < len(text) else None,
    }


def _record(path: Path) -> JsonObject:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            record: Json = json.loads(file.read()) if S_ISREG(os.fstat(descriptor).st_mode) else None
    except (OSError, ValueError, RecursionError) as error:
        raise _gone(path) from error
    if not isinstance(record, dict):
        raise _gone(path)
    return record


def _gone(path: Path) -> NotFound:
    return NotFound(
        f"The output {path.stem!r} is not there any more.",
        suggestion="Run the tool again: old outputs are removed when new ones come.",
    )
