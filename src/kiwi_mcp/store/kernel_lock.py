"""Which kernels still run: each one locks a file of its own for as long as its process lives."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from threading import Lock

from kiwi_mcp.domain.errors import StoreUnavailable

FOLDER = "state/kernels"
_HOME = "home"  # the file with the name of this folder: a kernel of another folder cannot be judged from here


class KernelLock:
    """The lock of one kernel, taken when its name is first asked for. A process that is killed loses it."""

    def __init__(self, user: Path) -> None:
        self._folder = user / FOLDER
        self._mutex = Lock()
        self._file: int | None = None
        self._name = ""

    def name(self) -> str:
        """Return the name of this kernel, which is locked from then on."""
        with self._mutex:
            if self._file is None:
                try:
                    self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                    self._name = f"{self._home()}/{token_hex(16)}"
                    file = os.open(self._path(), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    fcntl.flock(file, fcntl.LOCK_EX)
                    self._file = file
                except OSError as error:
                    raise StoreUnavailable(
                        f"{self._folder} cannot be used: {error.strerror or error}.",
                        suggestion="Make the folder writable, and free space on its disk.",
                    ) from error
            return self._name

    def is_gone(self, kernel: str) -> bool:
        """Whether a kernel is known to have ended; one of another folder is not known here."""
        home, _, token = kernel.partition("/")
        if not token.isalnum() or kernel == self._name or home != self._home_if_any():
            return False
        path = self._folder / f"{token}.lock"
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(file)
        with suppress(OSError):
            path.unlink()
        return True

    def close(self) -> None:
        """Release the lock."""
        with self._mutex:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):
                    self._path().unlink()
                os.close(file)

    def _path(self) -> Path:
        return self._folder / f"{self._name.partition('/')[2]}.lock"

    def _home(self) -> str:
        """Return the name of the folder, which the first kernel gives it."""
        if known := self._home_if_any():
            return known
        draft = self._folder / f".{_HOME}-{token_hex(8)}"
        draft.write_text(token_hex(16))
        try:
            with suppress(FileExistsError):
                os.link(draft, self._folder / _HOME)
        finally:
            draft.unlink()
        return (self._folder / _HOME).read_text()

    def _home_if_any(self) -> str | None:
        try:
            return (self._folder / _HOME).read_text()
        except OSError:
            return None
