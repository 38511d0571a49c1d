"""The environment of a tool: its folder of packages, built once under a file lock, its variables and its programs."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from time import monotonic

from msgspec import Struct, field

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.primitives.process.spawn import search_path


class Environment(Struct, frozen=True):
    """A folder of installed packages, named by its content; without packages it is only an interpreter."""

    kind: str = ""
    folder: str = ""
    packages: tuple[str, ...] = ()
    bin: str = ""
    """Stands first on the PATH of the process."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Commands that mean a program of this environment, whatever the PATH says."""
    linked: str = ""
    """The folder of modules that must be found beside the tool's files."""
    lock: str = ""
    """The file of the tool's that says which versions and hashes; empty where Kiwi finds out."""

    def to_json(self) -> JsonObject:
        """Return what a plan says about it."""
        own = {"lock": self.lock} if self.lock else {}
        return {"kind": self.kind, "folder": self.folder, "packages": list(self.packages), "linked": self.linked, **own}


def address(*parts: str) -> str:
    """Return the name of a folder, derived from these parts alone."""
    return sha256("\0".join(parts).encode()).hexdigest()


def base_env(tool: Tool, space: Space, environment: Environment) -> Mapping[str, str]:
    """Return the variables every process gets; no other one is inherited."""
    return {
        "PATH": search_path(environment.bin),
        "HOME": os.environ.get("HOME") or str(Path.home()),
        "LANG": "C.UTF-8",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - where temporary files usually are
        "USER": os.environ.get("USER", ""),
        "KIWI_PROJECT": str(space.project),
        "KIWI_TOOL_ID": tool.id,
    }


COMPLETE = ".complete"
"""The file that is written last: a folder without it was left half-made and is made again."""
_LONGEST_WAIT = 900.0
_LOOK_AGAIN = 0.05


async def make_once(folder: Path, make: Callable[[Path], Awaitable[None]], *, proof: str = "") -> None:
    """Have `folder` as `make` makes it, once among all kernels; the path `proof` below it must exist too."""
    if is_made(folder, proof):
        return
    async with _locked(folder.with_name(f"{folder.name}.lock")):
        if is_made(folder, proof):
            return
        _clear(folder)
        try:
            await make(folder)
        except BaseException:  # also when cancelled: nothing half-made stays
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / COMPLETE).touch()


def is_made(folder: Path, proof: str = "") -> bool:
    """Whether the folder was made to the end and still is whole."""
    return (folder / COMPLETE).exists() and (folder / proof).exists()


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    # The lock belongs to the open file, so the system lets go of it when a kernel dies. The file itself stays:
    # removing it would let two kernels hold locks on two files of one name.
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    last = monotonic() + _LONGEST_WAIT
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if monotonic() >= last:
                    raise Unavailable(
                        f"Another Kiwi has been making {path.stem!r} for {_LONGEST_WAIT:.0f} seconds.",
                        suggestion="Look what that process waits for; end it, then try again.",
                    ) from None
                await asyncio.sleep(_LOOK_AGAIN)
        yield
    finally:
        os.close(descriptor)
