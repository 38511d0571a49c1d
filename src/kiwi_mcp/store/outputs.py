"""Outputs: one file per run in the project, with retention, and handles for large results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from errno import ELOOP
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern

FOLDER = "outputs/tools"
INLINE_LIMIT = 64_000  # the largest result, in characters of JSON, that an answer carries whole
PREVIEW = 2_000
_LINE = 400  # how much of a line that matches is shown
PAGE = 64_000  # the maximum size of one page of an output
_encode = json.JSONEncoder(ensure_ascii=False).encode
_quote = json.encoder.encode_basestring
_STEM = len("output_20260128_120000")
_HANDLE = lazy_pattern(r"([a-z0-9][a-z0-9_-]{0,127})/(output_\d{8}_\d{6}(?:_\d{1,6})?)")


class Retention(Struct, frozen=True):
    """How many outputs of one tool are kept; up to a fifth more may lie there before the oldest go."""

    count: int = 50


class OutputFolder(Struct, frozen=True):
    """The folder of one tool's outputs, which folder it was when it was looked through, and its names, oldest first."""

    folder: str
    inode: tuple[int, int]
    names: list[str]


_folders: dict[str, OutputFolder] = {}
_FOLDERS_KEPT = 256


class StoredOutput(Struct, frozen=True):
    """An output that was written: its path below the project, and the handle to read it again."""

    path: str
    handle: str


def keep(project_ai: Path, tool_id: str, record: JsonObject, *, now: datetime, retention: Retention) -> StoredOutput:
    """Write a run's record under a name of its own, then drop the oldest beyond the retention."""
    outputs = _output_folder(f"{project_ai}/{FOLDER}/{tool_id}", depth=FOLDER.count("/") + 2)
    # As `%Y%m%d_%H%M%S`, which takes ten times as long.
    stem = f"output_{now.year:04}{now.month:02}{now.day:02}_{now.hour:02}{now.minute:02}{now.second:02}"
    # Two runs in one second get two names; a name that exists is never written over, nor followed if it is a link.
    # Numbers only rise: one that was freed would make the newest output look like the oldest.
    newest, first = outputs.names[-1] if outputs.names else "", 1
    if newest.startswith(stem):
        last = newest[_STEM + 1 :].removesuffix(".json")
        first = int(last) + 1 if last.isdecimal() else 2
    data = _lines(record)
    for number in range(first, 1_000_000):
        name = f"{stem}.json" if number == 1 else f"{stem}_{number}.json"
        try:
            _write(f"{outputs.folder}/{name}", data)
        except FileExistsError:
            continue
        break
    else:
        raise FileExistsError(f"{outputs.folder}/{stem}")
    outputs.names.append(name)
    # A few at a time: putting them in order for each one would cost more than writing it.
    if len(outputs.names) > retention.count + retention.count // 5:
        names = _names(outputs.folder)
        for old in names[: max(len(names) - retention.count, 0)]:
            with suppress(FileNotFoundError):
                os.unlink(f"{outputs.folder}/{old}")  # noqa: PTH108 - text, as all that is on the way of a run
        outputs.names[:] = names[-retention.count :]
    return StoredOutput(f"{project_ai.name}/{FOLDER}/{tool_id}/{name}", f"{tool_id}/{name.removesuffix('.json')}")


def rewrite(project_ai: Path, kept: StoredOutput, record: JsonObject) -> None:
    """Replace a stored record atomically: a reader sees either the old record or the new one."""
    tool_id, _, stem = kept.handle.rpartition("/")
    outputs = _output_folder(f"{project_ai}/{FOLDER}/{tool_id}", depth=FOLDER.count("/") + 2)
    path = f"{outputs.folder}/{stem}.json"
    _write(f"{path}.new", _lines(record))  # a name that goes with the old ones, should it be left behind
    os.replace(f"{path}.new", path)  # noqa: PTH105 - text, as all that is on the way of a run


def _lines(record: JsonObject) -> bytes:
    """Return a record as JSON with a line for each of its words: readable, and quick to write."""
    lines: list[str] = []
    for word, value in record.items():
        # Setting up the encoder takes longer than writing what most words hold.
        if type(value) is str:
            text = _quote(value)
        elif type(value) is int:
            text = str(value)
        elif value is None:
            text = "null"
        else:
            text = "{}" if value == {} else _encode(value)
        lines.append(f'  "{word}": {text}')
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode(errors="backslashreplace")


def _output_folder(folder: str, *, depth: int) -> OutputFolder:
    """Return the folder of the outputs of a tool, listed again if it is another folder now."""
    if known := _folders.get(folder):
        try:
            state = os.lstat(folder)
            if known.inode == (state.st_dev, state.st_ino):
                return known
        except OSError:
            pass  # it is made again
    # A project may contain links: write and prune only inside the project's own folder.
    parts = folder.rsplit("/", depth)
    for end in range(2, depth + 2):
        if os.path.islink(part := "/".join(parts[:end])):  # noqa: PTH114 - text, as all that is on the way of a run
            raise OSError(ELOOP, f"{part} is a symbolic link, and links are not followed")
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - as above
    state = os.lstat(folder)
    known = _folders[folder] = OutputFolder(folder, (state.st_dev, state.st_ino), _names(folder))
    if len(_folders) > _FOLDERS_KEPT:
        del _folders[next(iter(_folders))]
    return known


def _names(folder: str) -> list[str]:
    names = (name for name in os.listdir(folder) if name.startswith("output_"))  # noqa: PTH208 - names are enough
    # By the second, then by the number behind it, which is longer the larger it is.
    return sorted(names, key=lambda name: (name[:_STEM], len(name), name))


def _write(path: str, data: bytes) -> None:
    """Make a file that was not there, for its owner alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.unlink(path)  # noqa: PTH108 - as above
        raise
    finally:
        os.close(descriptor)


def shorten(result: Json, kept: StoredOutput | None, text: str | None = None) -> JsonObject:
    """Return a result for an answer: whole, or a preview and a handle; `text` is its `result_text`, if known."""
    text = result_text(result) if text is None else text
    if len(text) <= INLINE_LIMIT or kept is None:
        return {"result": result}
    return {**preview(text), "result_handle": kept.handle}


def preview(text: str) -> JsonObject:
    """Return the words that tell of a large result without holding it."""
    return {"result": text[:PREVIEW], "result_is_preview": True, "result_characters": len(text)}


def result_text(result: Json) -> str:
    """Return a result as its pages show it: a text as it is, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def read_page(
    project_ai: Path,
    handle: str,
    *,
    offset: int,
    length: int,
    grep: str = "",
    stored: Callable[[str], bytes],
    check: Callable[[str], object],
) -> JsonObject:
    """Return part of a result, by its handle; with `grep` the lines that contain one of the texts `a|b`.

    `stored` gives those that are in the store, by the id of their run; `check` refuses a run that is not the reader's.
    """
    record = read_record(project_ai, handle)
    check(as_text(record.get("run_id")))
    if "result_sha256" in record:
        data = stored(as_text(record.get("run_id")))
        # The file is in the project, where other programs can write.
        if sha256(data).hexdigest() != record["result_sha256"]:
            raise _gone(handle)
        text = data.decode(errors="surrogatepass")
    else:
        text = result_text(record.get("result"))
    about: JsonObject = {
        "handle": handle,
        "path": str(_path(project_ai, handle)),
        "offset": offset,
        "total_characters": len(text),
    }
    if grep:
        return {**about, **_matches(text, grep, offset, min(length, PAGE))}
    page = text[offset : offset + min(length, PAGE)]
    end = offset + len(page)
    return {**about, "content": page, "next_offset": end if end < len(text) else None}


def _matches(text: str, wanted: str, first: int, length: int) -> JsonObject:
    """Return the lines with one of the texts `a|b` in them, with their numbers, from line `first` on."""
    texts = [one.casefold() for one in wanted.split("|") if one.strip()]
    try:  # of JSON, a line for each value and for each line of a text, with its place
        lines = [*_value_lines(json.loads(text), "")]
    except (ValueError, RecursionError):
        lines = text.splitlines()
    found = [
        (number, line[max(at - _LINE // 2, 0) :][:_LINE])
        for number, line in enumerate(lines)
        if (at := min((at for one in texts if (at := line.casefold().find(one)) >= 0), default=-1)) >= 0
    ]
    shown, following = "", None
    for number, line in found:
        if number >= first:
            if shown and len(shown) + len(line) > length:
                following = number
                break
            shown += f"{number}: {line}\n"
    return {"content": shown, "matches": len(found), "next_offset": following}


def _value_lines(value: Json, place: str) -> Iterator[str]:
    match value:
        case dict():
            for name, part in value.items():
                yield from _value_lines(part, f"{place}.{name}" if place else name)
        case list():
            for number, part in enumerate(value):
                yield from _value_lines(part, f"{place}[{number}]")
        case _:
            for line in text_of(value).splitlines():
                yield f"{place}: {line}" if place else line


def read_record(project_ai: Path, handle: str) -> JsonObject:
    """Return the stored record of a run, by its handle."""
    path = _path(project_ai, handle)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            record: Json = json.loads(file.read()) if S_ISREG(os.fstat(descriptor).st_mode) else None
    except (OSError, ValueError, RecursionError) as error:
        raise _gone(handle) from error
    if not isinstance(record, dict):
        raise _gone(handle)
    return record


def _path(project_ai: Path, handle: str) -> Path:
    found = _HANDLE.fullmatch(handle)
    if found is None:
        raise InvalidRequest(
            f"{handle!r} is not a result handle.", suggestion="Use the `result_handle` of a run as it was given."
        )
    return project_ai / FOLDER / found[1] / f"{found[2]}.json"


def _gone(handle: str) -> NotFound:
    return NotFound(
        f"The output {handle!r} is not there any more.",
        suggestion="Run the tool again: old outputs are removed when new ones come.",
    )
