"""The history of the memory folder: a git repository within it, which Kiwi alone writes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from kiwi_mcp.domain.errors import CommandMissing, InvalidRequest, NotFound, Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.drivers.git import SECONDS, run_git
from kiwi_mcp.memory.files import parts_of
from kiwi_mcp.primitives.process.run import ProcessResult

_COMMIT = lazy_pattern(r"[0-9a-f]{7,64}")
_BRANCH = "refs/heads/main"
_LOCKS = ("index.lock", "HEAD.lock", f"{_BRANCH}.lock")
_EXCLUDED = ".*\n"
"""What Kiwi writes into a repository that it makes: names that begin with a dot are not committed."""
_STALE = 2 * SECONDS
"""After how many seconds a lock is one that a killed git left: Kiwi gives git half of that."""
_PLAIN = {"100644", "100755"}
_SETTINGS = ("-c", "core.excludesFile=/dev/null", "-c", "core.autocrlf=false", "-c", "core.attributesFile=/dev/null")
"""No setting of the owner leaves a file out or changes its bytes."""


class GitHistory(Struct, frozen=True):
    """Commits of one folder; no setting, hook or filter of the repository starts a program."""

    root: Path

    async def open(self) -> None:
        """Make the repository if there is none; refuse one that Kiwi did not make: it would commit on its branch."""
        exclude = self.root / ".git" / "info" / "exclude"
        if not (self.root / ".git" / "HEAD").is_file():
            await self._ask("init", "-q", "--template=", "--initial-branch=main")
            exclude.parent.mkdir(exist_ok=True)
            exclude.write_text(_EXCLUDED, encoding="utf-8")
        elif not exclude.is_file() or exclude.read_text(encoding="utf-8", errors="replace") != _EXCLUDED:
            raise Unavailable(
                f"The memory folder {self.root} is a git repository of yours.",
                suggestion="Set `memory_root` to a folder without `.git`: Kiwi keeps the history of the memory there.",
            )
        for name in _LOCKS:  # of a git that was killed
            with suppress(OSError):
                if time.time() - (left := self.root / ".git" / name).stat().st_mtime > _STALE:
                    left.unlink()

    async def record(self, path: str, message: str) -> None:
        """Commit a file, or the whole folder, if it is not as it was committed last."""
        if await self._ask("status", "--porcelain", "-z", "--untracked-files=all", "--", path):
            await self._ask("add", "-A", "--", path)
            words = ("commit", "-q", "--no-verify", "--no-gpg-sign", "-F", "-")
            await self._ask(*words, stdin=message.encode())

    async def versions(self, path: str, limit: int) -> Sequence[JsonObject]:
        """Return the commits that changed a path."""
        if not await self._head():
            return []
        form = "--format=%h%x00%aI%x00%s%x00%(trailers:key=By,valueonly,separator=%x2C)"
        listed = await self._ask("log", f"-n{limit}", form, "--", path or ".")
        rows = (line.split("\0") for line in listed.decode(errors="replace").splitlines())
        return [{"commit": row[0], "at": row[1], "message": row[2], "by": row[3].strip()} for row in rows]

    async def content(self, path: str, commit: str) -> bytes:
        """Return a file as a commit has it."""
        if not _COMMIT.fullmatch(commit) or not await self._is_known(f"{commit}:{path}"):
            raise NotFound(
                f"{path!r} has no version {commit!r:.80}.", suggestion="memory_history lists the commits.", path=path
            )
        return await self._ask("cat-file", "blob", f"{commit}:{path}")

    async def exported(self) -> bytes:
        """Return all files and their history as a stream that `git fast-import` reads."""
        return await self._ask("fast-export", "--reencode=no", "main") if await self._head() else b""

    async def imported(self, stream: bytes) -> int:
        """Fill an empty folder from a stream, and return the number of files; a stream with other files is refused."""
        try:
            await self._read(stream)
            listed = await self._ask("ls-tree", "-r", "-z", "main")
            rows = [os.fsdecode(row).partition("\t") for row in listed.split(b"\0") if row]
            for head, _, path in rows:
                _check_plain(head, path)
            await self._ask("reset", "-q", "--hard", "main")
        except BaseException:
            shutil.rmtree(self.root / ".git", ignore_errors=True)
            raise
        return len(rows)

    async def _read(self, stream: bytes) -> None:
        """Read a stream into the repository. git refuses the features with which it could name files elsewhere."""
        done = await self._run("fast-import", "--quiet", stdin=stream)
        if done.exit_code != 0 or not await self._head():
            raise InvalidRequest(
                "The file is not an exported memory.", suggestion="Use a file of `kiwi memory export`."
            )

    async def _head(self) -> bool:
        return await self._is_known(_BRANCH)

    async def _is_known(self, name: str) -> bool:
        return (await self._run("rev-parse", "-q", "--verify", name)).exit_code == 0

    async def _run(self, *words: str, stdin: bytes = b"") -> ProcessResult:
        where = (f"--git-dir={self.root / '.git'}", f"--work-tree={self.root}", "--literal-pathspecs", *_SETTINGS)
        try:
            return await run_git((*where, *words), str(self.root), stdin)
        except CommandMissing as error:
            raise Unavailable("The memory needs git for its history.", suggestion="Install git.") from error

    async def _ask(self, *words: str, stdin: bytes = b"") -> bytes:
        result = await self._run(*words, stdin=stdin)
        if result.exit_code != 0 or result.timed_out or result.is_truncated:
            said = result.stderr.decode(errors="replace").strip().partition("\n")[0]
            raise Unavailable(
                f"The history of the memory cannot be kept: `git {words[0]}`: {said}.",
                suggestion=f"See that `git status` works in {self.root}.",
            )
        return result.stdout


def _check_plain(head: str, path: str) -> None:
    """Refuse what no memory has: links, other repositories, hidden files."""
    parts_of(path)
    if head.split(maxsplit=1)[0] not in _PLAIN:
        raise InvalidRequest(f"{path!r} is not a plain file.", suggestion="Remove it, and export the memory again.")
