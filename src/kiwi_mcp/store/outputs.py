"""Outputs: the record each run leaves as a file in the project, with retention and handles for large results."""

from __future__ import annotations

import json
import os
import re
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
_HANDLE = re.compile(r"([a-z0-9][a-z0-9_-]{0,127})/(output_\d{8}_\d{6}(?:_\d{1,6})?)")


@dataclass(frozen=True, slots=True)
class Retention:
    """How many outputs of one tool are kept."""

    count: int = 50


@dataclass(frozen=True, slots=True)
class Kept:
    """An output that was written: its path below the project, and the handle to read it again."""

    path: str
    handle: str


def keep(project_ai: Path, tool_id: str, record: JsonObject, *, now: datetime, retention: Retention) -> Kept:
    """Write a run's record under a name of its own, then drop the oldest beyond the retention."""
    folder = _folder(project_ai, tool_id)
    text = json.dumps(record, ensure_ascii=False, indent=2)
    path = _write_new(folder, now.strftime("output_%Y%m%d_%H%M%S"), text)
    _prune(folder, retention)
    return Kept(f"{project_ai.name}/{FOLDER}/{tool_id}/{path.name}", f"{tool_id}/{path.stem}")


def _folder(project_ai: Path, tool_id: str) -> Path:
    # A project may come with links in it: written and pruned is only what really lies in its own folder.
    folder = project_ai
    for part in (*FOLDER.split("/"), tool_id):
        folder /= part
        if folder.is_symlink():
            raise OSError(ELOOP, f"{folder} is a symbolic link, and links are not followed")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_new(folder: Path, stem: str, text: str) -> Path:
    # Two runs in one second get two names; a name that exists is never written over, nor followed if it is a link.
    # Numbers only rise: one that was freed would make the newest output look like the oldest.
    taken = [_age(entry.name)[1] for entry in os.scandir(folder) if entry.name.startswith(stem)]
    for number in range(max(taken, default=0) + 1, 1_000_000):
        path = folder / (f"{stem}.json" if number == 1 else f"{stem}_{number}.json")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return path
    raise FileExistsError(folder / stem)


def _prune(folder: Path, retention: Retention) -> None:
    names = [entry.name for entry in os.scandir(folder) if entry.name.startswith("output_")]
    if len(names) > retention.count:
        for name in sorted(names, key=_age)[: len(names) - retention.count]:
            (folder / name).unlink(missing_ok=True)


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
