"""The git vault: contents as objects, and each run under a private ref; no index, branch, hook or filter is touched.

Git is asked by plumbing alone. It reads neither files of the project nor its attributes: contents are handed to it as
they are, so that no filter runs and every byte comes back. The trees are built in an index of their own.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import CommandMissing, Unavailable
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.run import is_run_id
from kiwi_mcp.kernel.checkpoints.record import Record
from kiwi_mcp.kernel.checkpoints.scope import is_left_out
from kiwi_mcp.kernel.checkpoints.tree import LARGEST, SECONDS, Entry, Snapshot, content
from kiwi_mcp.kernel.checkpoints.vault import Listing
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives import subprocess
from kiwi_mcp.primitives.program import search_path
from kiwi_mcp.primitives.subprocess import ProcessResult

REFS = "refs/kiwi/checkpoints/"
_MOST_OUTPUT = 64_000_000
_BATCH = 32_000_000
_STALE = 86_400.0
_CAREFUL = (
    "--no-pager", "--no-replace-objects", "--no-optional-locks",
    *(word for setting in (
        "core.fsmonitor=false", "core.untrackedCache=false", "core.hooksPath=/dev/null",
        "core.logAllRefUpdates=false", "core.splitIndex=false", "index.sparse=false", "gc.auto=0",
        "core.protectNTFS=false", "core.protectHFS=false", "i18n.commitEncoding=UTF-8", "protocol.allow=never",
        "safe.bareRepository=explicit",
    ) for word in ("-c", setting)),
)  # fmt: skip
"""A repository's own settings may name programs: none of them is started, and nothing is fetched."""
_IDENTITY = {
    f"GIT_{who}_{word}": value
    for who in ("AUTHOR", "COMMITTER")
    for word, value in (("NAME", "Kiwi"), ("EMAIL", "kiwi@localhost"))
}
_GITLINK = "160000"


@dataclass(frozen=True, slots=True)
class Git:
    """A repository as it is asked: its folder, how it names contents, and the project within it."""

    space: Space
    folder: str
    algorithm: str

    async def paths(self) -> Listing:
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
        return Listing([path for path in found if not is_left_out(path)], repositories, await self._ignored())

    async def keep(self, entries: Snapshot) -> Snapshot:
        """Write the objects that the repository does not have yet, and return the entries under their ids."""
        missing = await self._missing({entry.id for entry in entries.values()})
        wanted = {path: entry for path, entry in entries.items() if entry.id in missing}
        if not wanted:
            return entries
        with _staging(self.space.cache) as folder:
            staged = await asyncio.to_thread(_stage, self.space.project, wanted, folder)
            names = "".join(f"{number}\n" for number in range(len(staged))).encode()
            written = await self._ask("hash-object", "-w", "--no-filters", "--stdin-paths", stdin=names, cwd=folder)
        # A file may have changed since it was looked at: what was kept is what counts.
        ids = dict(zip(staged, written.decode().split(), strict=True))
        return {
            path: Entry(entry.mode, ids.get(path, entry.id), staged.get(path, entry.size))
            for path, entry in entries.items()
            if path in ids or path not in wanted
        }

    async def read(self, entries: Iterable[Entry]) -> Mapping[str, bytes]:
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

    async def seal(self, record: Record, contents: Mapping[str, Snapshot]) -> None:
        """Point the run's ref at a commit that holds the contents by their paths, and the record as its message."""
        with _staging(self.space.cache) as folder:
            own = {"GIT_INDEX_FILE": f"{folder}/index"}
            await self._ask("update-index", "-z", "--index-info", stdin=_index_lines(contents), env=own)
            tree = (await self._ask("write-tree", "--missing-ok", env=own)).decode().strip()
        message = b"Checkpoint of %s\n\n%s\n" % (record.run_id.encode(), record.to_text())
        commit = (await self._ask("commit-tree", "--no-gpg-sign", tree, stdin=message)).decode().strip()
        await self._ask("update-ref", "--no-deref", f"{REFS}{record.run_id}", commit)

    async def runs(self) -> Sequence[str]:
        """Return the runs that have a ref, the oldest first."""
        listed = await self._ask("for-each-ref", "--format=%(refname)", REFS)
        names = (line.removeprefix(REFS) for line in listed.decode(errors="replace").splitlines())
        return sorted(filter(is_run_id, names))

    async def records(self, runs: Sequence[str]) -> Sequence[Record]:
        """Return the records of some runs."""
        asked = "".join(f"{REFS}{run}\n" for run in runs).encode()
        answer = await self._ask("cat-file", "--batch", stdin=asked) if runs else b""
        # A commit is its head, its title and its text, with empty lines between.
        texts = [(data or b"").partition(b"\n\n")[2].partition(b"\n\n")[2] for _, data in _objects(answer)]
        records = (Record.of_text(text, run) for run, text in zip(runs, texts, strict=True))
        return [record for record in records if record is not None]

    async def drop(self, runs: Sequence[str]) -> None:
        """Delete the refs of some runs; git removes in its own time what nothing refers to."""
        if runs:
            await self._ask("update-ref", "--stdin", stdin="".join(f"delete {REFS}{run}\n" for run in runs).encode())

    async def _ignored(self) -> Sequence[str]:
        listed = await self._ask(
            "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--directory", "--", "."
        )
        return [os.fsdecode(line) for line in listed.split(b"\0") if line]

    async def _missing(self, ids: Iterable[str]) -> set[str]:
        asked = "".join(f"{name}\n" for name in ids).encode()
        answer = await self._ask("cat-file", "--batch-check=%(objectname)", "--buffer", stdin=asked)
        return {line.split()[0] for line in answer.decode().splitlines() if line.endswith(" missing")}

    async def _ask(
        self, *words: str, stdin: bytes = b"", cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> bytes:
        # In another folder than the project git would look for another repository.
        where = (f"--git-dir={self.folder}", f"--work-tree={cwd}") if cwd else ()
        result = await _git((*where, *words), cwd or str(self.space.project), stdin, env or {})
        if result.exit_code != 0 or result.timed_out or result.is_truncated:
            raise _failed(words[0], result)
        return result.stdout


async def repository(space: Space) -> Git | None:
    """Return the repository that a project lies in; None where it lies in none, or where that ignores all of it."""
    words = ("rev-parse", "--show-toplevel", "--absolute-git-dir", "--show-object-format")
    project = str(space.project)
    try:
        result = await _git(words, project)
    except CommandMissing:
        return None
    if result.exit_code != 0:
        if b"not a git repository" in result.stderr or b"must be run in a work tree" in result.stderr:
            return None
        raise _failed("rev-parse", result)
    match os.fsdecode(result.stdout).splitlines():
        case [top, folder, algorithm]:
            is_ignored = top != project and await _ignores(top, project)
            return None if is_ignored else Git(space, folder, algorithm)
        case _:
            raise Unavailable("The path of the repository has a line break.", suggestion="Move it to another path.")


async def _ignores(top: str, project: str) -> bool:
    result = await _git(("check-ignore", "-q", "--", project), top)
    if result.exit_code not in {0, 1}:
        raise _failed("check-ignore", result)
    return result.exit_code == 0


async def _git(
    words: Sequence[str], cwd: str, stdin: bytes = b"", env: Mapping[str, str] | None = None
) -> ProcessResult:
    spec = ProcessSpec(
        argv=("git", *_CAREFUL, *words),
        cwd=cwd,
        env={**_env(), **{name: escape(value) for name, value in (env or {}).items()}},
        stdin=stdin,
        timeout=SECONDS,
        output_limit=2 * _MOST_OUTPUT,
    )
    return await subprocess.run(spec)


def _env() -> Mapping[str, str]:
    """Return what git sees: where the owner's own settings are, for what they ignore, and no other variable."""
    homes = {"HOME": os.environ.get("HOME", ""), "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", "")}
    return {
        "PATH": escape(search_path()),
        "LC_ALL": "C",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_ALLOW_PROTOCOL": "none",
        **_IDENTITY,
        **{name: escape(value) for name, value in homes.items() if value},
    }


def _failed(word: str, result: ProcessResult) -> Unavailable:
    said = result.stderr.decode(errors="replace").strip().partition("\n")[0].rstrip(".")
    reason = f"took longer than {SECONDS:.0f} seconds" if result.timed_out else said or "failed"
    return Unavailable(f"`git {word}`: {reason}.", suggestion="See that `git status` works in the project.")


@contextmanager
def _staging(cache: Path) -> Iterator[str]:
    """Give a folder that goes away; what a killed process left there goes too."""
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


def _index_lines(contents: Mapping[str, Snapshot]) -> bytes:
    lines = [
        f"{_mode(entry)} {entry.id}\t{folder}/{path}\0"
        for folder, entries in contents.items()
        for path, entry in entries.items()
    ]
    return os.fsencode("".join(lines))


def _mode(entry: Entry) -> str:
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
