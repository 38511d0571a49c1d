"""Files of the owner: locked and atomic replacement; changes of YAML files that keep comments and order."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import Json

_PATIENCE = 10.0


@contextmanager
def changing(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yield the function that replaces a file, under a lock. Read the file within the block, or it may be outdated."""
    path = Path(os.path.realpath(path))  # a link in its place stays one
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        _lock(folder, path)
        yield lambda data: _replace(path, data, folder)
    finally:
        os.close(folder)


def _replace(path: Path, data: bytes, folder: int) -> None:
    """Replace the content of a file atomically: readers see the old or the new content, also after a power loss."""
    try:
        put_file(path, data, path.stat().st_mode & 0o777 if path.exists() else 0o600)
        os.fsync(folder)
    except OSError as error:
        raise _unwritable(path, error) from error


def put_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file under a temporary name, and rename it when it is on the disk."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _lock(folder: int, path: Path) -> None:
    end = monotonic() + _PATIENCE
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() > end:
                raise Unavailable(f"Another process is changing {path}.", suggestion="Try again.") from None
            sleep(0.02)
        except OSError as error:
            raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"{path} cannot be written: {error.strerror or error}.",
        suggestion=f"Give yourself write access to {path.parent}, or name another space with USER_SPACE.",
    )


def rewrite(
    path: Path, section: str, change: Callable[[dict[str, Json]], object], *, check: Callable[[], object]
) -> None:
    """Change the entries of one section of a file, under a lock.

    `check` refuses a file that cannot be parsed; such a file must not be written to. A section that is a list of names
    becomes a mapping, with the value true for each name.
    """

    def change_section(written: dict[str, Any]) -> None:
        entries = written.get(section) or {}
        written[section] = dict.fromkeys(entries, True) if isinstance(entries, list) else entries
        change(written[section])

    rewrite_keys(path, change_section, check=check)


def rewrite_keys(path: Path, change: Callable[[dict[str, Any]], object], *, check: Callable[[], object]) -> None:
    """Change the keys of a file, under a lock; `check` as for `rewrite`."""
    # Few commands change a file of the owner, and loading this takes longer than most calls.
    from ruamel.yaml import YAML  # noqa: PLC0415

    with changing(path) as put:
        check()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        yaml = YAML()
        yaml.preserve_quotes, yaml.width = True, 4_096
        written = yaml.load(text)
        # Nothing is read of a file of comments alone, so they are kept as they are.
        kept = f"{text.rstrip()}\n" if written is None and text.strip() else ""
        written = written or {}
        change(written)
        made = StringIO()
        yaml.dump(written, made)
        put(f"{kept}{made.getvalue()}".encode())
