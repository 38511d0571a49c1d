"""The memory folder: its history, and moving what an older Kiwi kept beside it into it, and back.

The history is a git repository within the folder, which Kiwi alone writes. Of a move, every file is copied, compared
and only then removed, and what is moved is written down before the first one: a move that was killed at any moment is
completed, or taken back, by doing it again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from stat import S_IMODE
from typing import Literal

import msgspec
from msgspec import Struct, field

from kiwi_mcp.catalog.catalog import MEMORY_ITEMS
from kiwi_mcp.domain.errors import CommandMissing, Conflict, InvalidRequest, KiwiError, NotFound, Unavailable
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.drivers.git import SECONDS, run_git
from kiwi_mcp.manifest.owner_file import put_file
from kiwi_mcp.memory.files import parts_of
from kiwi_mcp.policy.preferences import FILE_NAME
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


RECORD = "state/memory_move.json"
"""What was moved, below the user's folder."""
_GONE = "is gone"


class MoveRecord(Struct):
    """What was moved: each file with its hash, the folders that it came from, and those that were made for it."""

    files: dict[str, str] = field(default_factory=dict)
    folders: dict[str, int] = field(default_factory=dict)
    """The mode of each."""
    made: list[str] = field(default_factory=list)


class MoveStep(Struct, frozen=True):
    """What happens to one file, and why it is not moved."""

    what: Literal["move", "keep"]
    path: str
    reason: str = ""


class MemoryMove(Struct, frozen=True):
    """The move between a user's folder and a memory."""

    user: Path
    memory: Path

    def there(self) -> list[MoveStep]:
        """Return what would be moved into the memory."""
        return self._steps(self._files(), self.user, self.memory)

    def back(self) -> list[MoveStep]:
        """Return what would be moved back."""
        return self._steps(sorted(self._record().files), self.memory, self.user)

    def move_there(self) -> list[MoveStep]:
        """Move everything that can be moved into the memory; all of it is compared again at the end."""
        steps, record = self.there(), self._record()
        moved = [step.path for step in steps if step.what == "move"]
        for folder in self._folders():
            record.folders.setdefault(folder, S_IMODE((self.user / folder).stat().st_mode))
            if not (self.memory / folder).exists() and folder not in record.made:
                record.made.append(folder)
        record.files.update({path: _digest(self.user / path) for path in moved})
        self._write(record)
        done = [self._carry(step, self.user, self.memory, record, record.files.get(step.path, "")) for step in steps]
        self._clear(record)
        for folder in sorted(self._folders(), reverse=True):
            with suppress(OSError):  # it holds what is not moved
                (self.user / folder).rmdir()
        for path in (step.path for step in done if step.what == "move"):
            if _digest(self.memory / path) != record.files[path]:
                fix = f"`kiwi run memory_history` has it as it was moved; its hash was {record.files[path]}."
                raise Conflict(f"{path} is not what was moved.", suggestion=fix)
        return done

    def move_back(self) -> list[MoveStep]:
        """Move back what was moved, as it is now; what cannot be moved back stays in the record."""
        record, steps = self._record(), self.back()
        for folder, mode in sorted(record.folders.items()):
            if _is_plain(self.user, folder):
                (self.user / folder).mkdir(exist_ok=True)
                (self.user / folder).chmod(mode)
        done = [
            self._carry(step, self.memory, self.user, record, _digest(self.memory / step.path))
            if step.what == "move"
            else step
            for step in steps
        ]
        self._clear(record)
        left = {step.path: record.files[step.path] for step in done if step.what == "keep" and step.reason != _GONE}
        for folder in sorted(record.made, reverse=True):
            with suppress(OSError):  # it holds what was written since
                (self.memory / folder).rmdir()
        if left:
            self._write(MoveRecord(left, record.folders, record.made))
        else:
            (self.user / RECORD).unlink(missing_ok=True)
        return done

    def _record(self) -> MoveRecord:
        try:
            return msgspec.json.decode((self.user / RECORD).read_bytes(), type=MoveRecord)
        except FileNotFoundError:
            return MoveRecord()
        except (OSError, msgspec.DecodeError) as error:
            fix = "Make it readable, or restore it from a backup: it says which files were moved."
            raise Unavailable(f"{self.user / RECORD} cannot be read: {error}.", suggestion=fix) from error

    def _write(self, record: MoveRecord) -> None:
        place = self.user / RECORD
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        put_file(place, msgspec.json.format(msgspec.json.encode(record)), 0o600)

    def _clear(self, record: MoveRecord) -> None:
        """Remove what a killed move left of copies."""
        for place in (base / path for path in record.files for base in (self.user, self.memory)):
            with suppress(OSError):  # there is none
                _draft(place).unlink()

    def _folders(self) -> list[str]:
        """Return the folders of items, and all in them, links apart."""
        tops = [self.user / name for name in MEMORY_ITEMS if not (self.user / name).is_symlink()]
        found = (Path(base) for top in tops for base, _, _ in os.walk(top))
        return sorted(str(one.relative_to(self.user)) for one in found)

    def _files(self) -> Iterator[str]:
        yield from (one for one in MEMORY_ITEMS if (self.user / one).is_symlink())
        if os.path.lexists(self.user / FILE_NAME):
            yield FILE_NAME
        for folder in self._folders():
            for one in sorted(os.scandir(self.user / folder), key=lambda entry: entry.name):
                if not one.is_dir(follow_symlinks=False):
                    yield f"{folder}/{one.name}"

    def _steps(self, paths: Iterable[str], home: Path, target: Path) -> list[MoveStep]:
        refused = ((path, self._refusal(path, home, target)) for path in paths)
        return [MoveStep("keep" if reason else "move", path, reason) for path, reason in refused]

    def _refusal(self, path: str, home: Path, target: Path) -> str:
        """Return why a file is not moved; a copy of it at the target is one that a move made before it was killed."""
        try:
            parts_of(path)
        except KiwiError as error:
            return error.message
        if not _is_plain(home, path) or not _is_plain(target, path):
            return "leads through a link"
        if above := [one for one in Path(path).parents[:-1] if (target / one).is_file()]:
            return f"{target / above[0]} is a file"
        if not (home / path).is_file():
            if (target / path).is_file():  # it was moved
                return ""
            return "is not a plain file" if os.path.lexists(home / path) else _GONE
        if os.path.lexists(target / path) and _digest(target / path) != _digest(home / path):
            return f"{target / path} is another file"
        return ""

    def _carry(self, step: MoveStep, home: Path, target: Path, record: MoveRecord, digest: str) -> MoveStep:
        """Move one file, if it is to be moved and still has a hash."""
        source, place = home / step.path, target / step.path
        if step.what == "keep" or not source.exists():  # it was moved before
            return step
        if not place.exists():
            for folder in reversed(Path(step.path).parents[:-1]):
                if not (target / folder).is_dir():
                    (target / folder).mkdir()
                    (target / folder).chmod(record.folders.get(str(folder), 0o700))
            draft = _draft(place)
            shutil.copy2(source, draft, follow_symlinks=False)
            _sync(draft)
            if _digest(draft) == digest:
                draft.rename(place)
                _sync(place.parent)
            else:
                draft.unlink()
        if digest != _digest(place) or digest != _digest(source):
            return MoveStep("keep", step.path, "changed while it was moved; do it again")
        source.unlink()
        return step


def _draft(place: Path) -> Path:
    """Return where a file is copied to before it is complete; the same each time, so that it can be found again."""
    return place.with_name(f".moving-{sha256(place.name.encode()).hexdigest()[:16]}")


def _is_plain(base: Path, path: str) -> bool:
    """Whether a path leads through no link below its base."""
    return not any((base / one).is_symlink() for one in (Path(path), *Path(path).parents[:-1]))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    """Return the hash of a file; empty for one that is not there."""
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""
