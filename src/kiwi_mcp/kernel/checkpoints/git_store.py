"""Where checkpoints are: a private ref in the project's repository, else a private bare repository."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import translate
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import CommandMissing, Unavailable
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.times import is_run_id
from kiwi_mcp.drivers.git import git_failed, run_git
from kiwi_mcp.kernel.checkpoints.file_changes import ALGORITHM, LARGEST, CheckpointRecord, FileState, Snapshot, content
from kiwi_mcp.kernel.paths import AUDIT_KEY
from kiwi_mcp.primitives.secrets.key_storage import Mac

SECRETS = (
    ".env", ".env.*", ".envrc", "*.pem", "*.key", "*.p12", "*.pfx", "*.p8", "*.jks", "*.keystore", "*.kdbx", "*.ppk",
    "*.gpg", "*.age", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".netrc", "_netrc", ".npmrc", ".pypirc",
    ".pgpass", ".htpasswd", ".git-credentials", "credentials", "credentials.*", "secrets.*", "*.tfstate",
)  # fmt: skip
"""Names of files that hold secrets as a rule; the case of letters makes no difference."""
FOLDERS = frozenset({".git", ".ssh", ".gnupg", ".aws", ".azure", ".gcloud", ".kube", ".docker", ".trash"})
OWN = (".ai/state", ".ai/outputs", ".ai/logs", ".ai/threads")
"""What Kiwi itself writes while tools run."""


_SECRET = lazy_pattern("|".join(map(translate, SECRETS)))
_OWN = lazy_pattern(f"(?:^|/)(?:{'|'.join(map(re.escape, OWN))})(?:/|$)")


def is_left_out(path: str) -> bool:
    """Whether nothing at a path is ever saved."""
    parts = path.lower().split("/")
    return (
        not FOLDERS.isdisjoint(parts)
        or _SECRET.match(parts[-1]) is not None
        or _OWN.search("/".join(parts)) is not None
    )


REFS = "refs/kiwi/checkpoints/"
_BATCH = 32_000_000
_STALE = 86_400.0
_GITLINK = "160000"
_FORM = b"kiwi-checkpoint-v1"
"""What a mark is made for: the key marks the ends of the chains of receipts too."""
_YOUNG = "1.day.ago"
"""Younger contents are not removed from a private repository: their record may be still to come."""


class TrackedPaths(Struct, frozen=True):
    """The paths that a checkpoint is about, and what is left out."""

    paths: Sequence[str]
    repositories: Sequence[str] = ()
    """Submodules, and other repositories within the project, which are left alone."""
    ignored: Sequence[str] = ()
    """What git ignores; a folder ends with a slash."""


class Git(Struct, frozen=True):
    """A repository as it is asked: its folder, how it names contents, and the project that it is about."""

    space: Space
    folder: str
    algorithm: str
    is_private: bool = False
    """Whether it is Kiwi's own, for a project without a repository."""

    async def paths(self) -> TrackedPaths:
        """Return what git would save of the project: neither ignored files nor secrets nor other repositories."""
        # Each line begins with what it is: `H 100644 id 0<tab>path` for what git knows, `? path` for what it does not.
        words = ("ls-files", "-z", "-t", "--stage", "--cached", "--others", "--exclude-standard", "--", ".")
        lines = [os.fsdecode(line) for line in (await self._ask(*words)).split(b"\0") if line]
        others = [line.removeprefix("? ") for line in lines if line.startswith("? ")]
        staged = [line.partition("\t") for line in lines if not line.startswith("? ")]
        repositories = [path for head, _, path in staged if head.split()[1] == _GITLINK]
        repositories += [path.rstrip("/") for path in others if path.endswith("/")]
        found = [path for head, _, path in staged if head.split()[1] != _GITLINK]
        found += [path for path in others if not path.endswith("/")]
        asked = ("ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory", "--", ".")
        ignored = [os.fsdecode(line) for line in (await self._ask(*asked)).split(b"\0") if line]
        return TrackedPaths([path for path in found if not is_left_out(path)], repositories, ignored)

    async def keep(self, entries: Snapshot) -> Snapshot:
        """Write the objects that the repository does not have yet, and return the entries under their ids."""
        ids = {entry.id for entry in entries.values()}
        asked = "".join(f"{name}\n" for name in ids).encode()
        answer = await self._ask("cat-file", "--batch-check=%(objectname)", "--buffer", stdin=asked)
        missing = {line.split()[0] for line in answer.decode().splitlines() if line.endswith(" missing")}
        if self.is_private:
            await asyncio.to_thread(_freshen, self.folder, ids - missing)
        wanted = {path: entry for path, entry in entries.items() if entry.id in missing}
        if not wanted:
            return entries
        with _staging(self.space.cache) as folder:
            staged = await asyncio.to_thread(_stage, self.space.project, wanted, folder)
            names = "".join(f"{number}\n" for number in range(len(staged))).encode()
            written = await self._ask("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=names, cwd=folder)
        # A file may have changed since it was looked at: what was kept is what counts.
        new = dict(zip(staged, written.decode().split(), strict=True))
        return {
            path: FileState(entry.mode, new.get(path, entry.id), staged.get(path, entry.size))
            for path, entry in entries.items()
            if path in new or path not in wanted
        }

    async def read(self, entries: Iterable[FileState]) -> Mapping[str, bytes]:
        """Return contents by their ids."""
        found: dict[str, bytes] = {}
        for batch in _batches({entry.id: entry.size for entry in entries}):
            answer = await self._ask("cat-file", "--batch", stdin="".join(f"{name}\n" for name in batch).encode())
            found |= {name: data for name, data in _objects(answer) if data is not None}
            if not found.keys() >= {*batch}:
                raise Unavailable(
                    "The repository no longer holds what the checkpoint needs.",
                    suggestion="Restore the files from your own commits or backups.",
                )
        return found

    async def seal(self, record: CheckpointRecord, contents: Mapping[str, Snapshot]) -> str:
        """Point the run's ref at a commit with the contents, and the record as its message; return the commit."""
        lines = [
            f"{_mode(entry)} {entry.id}\t{folder}/{path}\0"
            for folder, entries in contents.items()
            for path, entry in entries.items()
        ]
        with _staging(self.space.cache) as staging:
            own = {"GIT_INDEX_FILE": f"{staging}/index"}
            await self._ask("update-index", "-z", "--index-info", stdin=os.fsencode("".join(lines)), env=own)
            tree = (await self._ask("write-tree", "--missing-ok", env=own)).decode().strip()
        text = record.to_text()
        mark = await asyncio.to_thread(self._mac().of, self._marked(text))
        message = b"Checkpoint of %s\n\n%s\n\n%s\n" % (record.run_id.encode(), text, mark.encode())
        commit = (await self._ask("commit-tree", "--no-gpg-sign", tree, stdin=message)).decode().strip()
        await self._ask("update-ref", "--no-deref", f"{REFS}{record.run_id}", commit)
        return commit

    async def changed_lines(self, commit: str) -> tuple[int, int]:
        """Return how many lines were added and deleted between the two sides of a commit; files without lines are 0."""
        listed = (await self._ask("ls-tree", "--name-only", commit)).decode().split()
        empty = (await self._ask("mktree")).decode().strip()
        sides = [f"{commit}:{word}" if word in listed else empty for word in ("before", "after")]
        counted = await self._ask(
            "diff-tree", "-r", "--numstat", "--no-renames", "--no-ext-diff", "--no-textconv", *sides
        )
        rows = [line.split(b"\t", 2)[:2] for line in counted.splitlines()]
        added, deleted = (sum(int(row[side]) for row in rows if row[side].isdigit()) for side in (0, 1))
        return added, deleted

    async def runs(self) -> Sequence[str]:
        """Return the runs that have a ref, the oldest first."""
        listed = await self._ask("for-each-ref", "--format=%(refname)", REFS)
        names = (line.removeprefix(REFS) for line in listed.decode(errors="replace").splitlines())
        return sorted(filter(is_run_id, names))

    async def records(self, runs: Sequence[str]) -> Sequence[CheckpointRecord]:
        """Return the records of some runs, without those that are gone or are not what was written."""
        asked = "".join(f"{REFS}{run}\n" for run in runs).encode()
        answer = await self._ask("cat-file", "--batch", stdin=asked) if runs else b""
        # A commit is its head, its title, the record and its mark, with empty lines between.
        found = [(name, (data or b"").partition(b"\n\n")[2].partition(b"\n\n")[2]) for name, data in _objects(answer)]
        return await asyncio.to_thread(self._read_records, runs, found)

    def _read_records(self, runs: Sequence[str], texts: Sequence[tuple[str, bytes]]) -> Sequence[CheckpointRecord]:
        mac, found = self._mac(), []
        for run_id, (commit, written) in zip(runs, texts, strict=True):
            text, _, mark = written.partition(b"\n\n")
            record = CheckpointRecord.of_text(text, run_id)
            if record is None or (mark and not mac.fits(self._marked(text), mark.decode(errors="replace").strip())):
                continue
            found.append(replace(record, is_marked=bool(mark), commit=commit))
        return found

    def _mac(self) -> Mac:
        return Mac(self.space.user / AUDIT_KEY)

    def _marked(self, text: bytes) -> bytes:
        """Return what the mark of a record is made of: a record counts for its project alone."""
        return b"\n".join((_FORM, os.fsencode(self.space.project), text))

    async def drop(self, runs: Sequence[str]) -> None:
        """Delete the refs of some runs; git removes in its own time what nothing refers to."""
        if runs:
            await self._ask("update-ref", "--stdin", stdin="".join(f"delete {REFS}{run}\n" for run in runs).encode())

    async def drop_oldest(self, runs: Sequence[str]) -> None:
        """Forget the oldest runs; a private repository also loses the contents that nothing refers to."""
        await self.drop(runs)
        if runs and self.is_private:
            await self._ask("prune", f"--expire={_YOUNG}")

    async def _ask(
        self, *words: str, stdin: bytes = b"", cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> bytes:
        folder = cwd or str(self.space.project)
        # In another folder than the project git would look for another repository.
        where = (f"--git-dir={self.folder}", f"--work-tree={folder}") if cwd or self.is_private else ()
        result = await run_git((*where, *words), folder, stdin, env or {})
        if result.exit_code != 0 or result.timed_out or result.is_truncated:
            raise git_failed(words[0], result)
        return result.stdout


async def stores(space: Space) -> list[Git]:
    """Return every repository that may hold checkpoints of a project: it may have become a repository since."""
    own, folder = await repository(space), _private_folder(space)
    private = Git(space, str(folder), ALGORITHM, is_private=True) if (folder / "HEAD").is_file() else None
    return [store for store in (own, private) if store]


async def private_repository(space: Space) -> Git:
    """Return Kiwi's own repository for a project, which is made when it is first needed."""
    folder = _private_folder(space)
    if not (folder / "HEAD").is_file():
        await _make_private(folder)
    return Git(space, str(folder), ALGORITHM, is_private=True)


def _private_folder(space: Space) -> Path:
    name = sha256(os.fsencode(space.project)).hexdigest()[:32]
    return space.user / "state" / "checkpoints" / f"{name}.git"


async def _make_private(folder: Path) -> None:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = folder.with_name(f".{token_hex(8)}")
    words = ("init", "-q", "--bare", "--template=", f"--object-format={ALGORITHM}", str(draft))
    try:
        result = await run_git(words, str(folder.parent))
        if result.exit_code != 0:
            raise git_failed("init", result)
        with suppress(OSError):  # another process made it at the same time
            draft.rename(folder)
    except CommandMissing as error:
        raise Unavailable("git is not installed.", suggestion="Install git.") from error
    finally:
        await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    if not (folder / "HEAD").is_file():
        raise Unavailable(f"{folder} cannot be made.", suggestion=f"See that you may write to {folder.parent}.")


async def repository(space: Space) -> Git | None:
    """Return the repository that contains a project; None if there is none, or if it ignores the whole project."""
    words = ("rev-parse", "--show-toplevel", "--absolute-git-dir", "--show-object-format")
    project = str(space.project)
    try:
        result = await run_git(words, project)
    except CommandMissing:
        return None
    if result.exit_code != 0:
        if b"not a git repository" in result.stderr or b"must be run in a work tree" in result.stderr:
            return None
        raise git_failed("rev-parse", result)
    match os.fsdecode(result.stdout).splitlines():
        case [top, folder, algorithm] if top == project:
            return Git(space, folder, algorithm)
        case [top, folder, algorithm]:
            ignored = await run_git(("check-ignore", "-q", "--", project), top)
            if ignored.exit_code not in {0, 1}:
                raise git_failed("check-ignore", ignored)
            return Git(space, folder, algorithm) if ignored.exit_code else None
        case _:
            raise Unavailable("The path of the repository has a line break.", suggestion="Move it to another path.")


@contextmanager
def _staging(cache: Path) -> Iterator[str]:
    """Yield a temporary folder; what a killed process left there is removed too."""
    home = cache / "checkpoints"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for left in home.iterdir():
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE:
                shutil.rmtree(left)
    with TemporaryDirectory(dir=home) as folder:
        yield folder


def _stage(project: Path, entries: Snapshot, folder: str) -> dict[str, int]:
    """Copy contents to files named by their place, and return the size of each that could be had."""
    staged: dict[str, int] = {}
    for path, entry in entries.items():
        if (data := content(project, path, entry)) is not None:
            Path(folder, str(len(staged))).write_bytes(data)
            staged[path] = len(data)
    return staged


def _freshen(folder: str, ids: Iterable[str]) -> None:
    """Note that contents of a private repository are in use, so that they are not removed as old ones."""
    for name in ids:
        with suppress(OSError):
            os.utime(f"{folder}/objects/{name[:2]}/{name[2:]}")


def _mode(entry: FileState) -> str:
    return "120000" if entry.is_link else "100755" if entry.mode & 0o100 else "100644"


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > _BATCH:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += min(size, LARGEST)
    if batch:
        yield batch


def _objects(answer: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield each object of a batch: a line with its id, its kind and its size, then its bytes; None if missing."""
    place = 0
    while place < len(answer):
        end = answer.index(b"\n", place)
        match answer[place:end].split():
            case [name, _, size] if size.isdigit():
                start, place = end + 1, end + 2 + int(size)
                yield name.decode(), answer[start : place - 1]
            case words:
                place = end + 1
                yield words[0].decode(), None
