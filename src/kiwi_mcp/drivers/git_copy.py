"""The copy of a git folder for a server or a tool, and how its commits reach the repository.

A server that may change a repository, and a tool that also declares that it needs git, finds in the place of its `.git`
a copy that it may write to; the objects of the real one are in it read-only. After each call Kiwi takes over new
objects, branches, tags and the index, as data that git checks. Nothing else that is written there reaches the real
folder: no settings, hooks, attributes or links.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from stat import S_ISREG
from tempfile import mkdtemp

from msgspec import Struct

from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.drivers.git import git_failed, run_git
from kiwi_mcp.sandbox.linux import open_beneath
from kiwi_mcp.sandbox.process_setup import OBJECTS

_TAKEN = ("refs/heads/", "refs/tags/")
"""The refs that a server may change."""
_OBJECT = re.compile(r"objects/(?:[0-9a-f]{2}/[0-9a-f]{38,62}|pack/pack-[0-9a-f]{40,64}\.(?:pack|idx))")
_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MOST_BYTES, _MOST_FILES = 256_000_000, 100_000
_DEEPEST = 64
_GITLINK = b"160000"
_UNDER_WAY = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")
"""What git has while the next commit would have a meaning that the copy does not know of."""
_PLAIN = ("shallow", "info/exclude", "info/attributes")
"""Files of the owner's that say what there is and what to ignore, and name no program."""


class RepositoryState(Struct, frozen=True):
    """What a server may change in a git folder: the head, branches and tags, and the digest of the index."""

    head: str
    refs: Mapping[str, str]
    index: str


@asynccontextmanager
async def git_copies(profile: SandboxProfile, cache: Path) -> AsyncIterator[tuple[GitCopy, ...]]:
    """Yield a copy of the git folder of each repository that a sandboxed process may change."""
    found = [f"{path}/.git" for path in profile.writable if profile.level in {"sandboxed", "restricted"}]
    own = [git for git in found if _is_own(git)]
    if not own:
        yield ()
        return
    place = cache / "git"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    home = Path(mkdtemp(dir=place))
    try:
        made = await asyncio.gather(*(GitCopy.make(git, home / str(number)) for number, git in enumerate(own)))
        yield tuple(copy for copy in made if copy is not None)
    finally:
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)


def _is_own(git: str) -> bool:
    """Whether a path is a whole git folder of this user's, without a merge under way; a work tree has a file there."""
    with suppress(OSError):
        if any(os.path.lexists(f"{git}/{name}") for name in _UNDER_WAY):
            return False
        return os.lstat(git).st_uid == os.geteuid() and os.path.isdir(f"{git}/objects") and not os.path.islink(git)  # noqa: PTH112, PTH114 - text
    return False


class GitCopy:
    """The copy of one git folder."""

    def __init__(self, git: str, home: Path) -> None:
        self.git = git
        """The real one."""
        self.folder = home / "copy"
        """What the server has in its place."""
        self._staged = home / "staged"
        self._lock = asyncio.Lock()
        self._known = RepositoryState("", {}, "")
        self._calls = 0

    @classmethod
    async def make(cls, git: str, home: Path) -> GitCopy | None:
        """Return a copy of a git folder; None where git does not work there, or only some files are checked out."""
        copy = cls(git, home)
        try:
            listed = (await copy._ask("config", "--list", "-z")).decode(errors="replace")
            settings = dict(line.partition("\n")[::2] for line in listed.split("\0") if line)
            if settings.get("core.sparsecheckout") == "true":
                return None
            await asyncio.to_thread(copy._create, settings, await copy._ask("rev-parse", "--show-object-format"))
            await copy._lay(await copy._real())
        except (KiwiError, OSError):
            return None
        return copy

    async def refresh(self) -> None:
        """Let the server see what the owner changed since the last call, before a call begins."""
        async with self._lock:
            self._calls += 1
            if self._calls > 1:
                return
            with suppress(KiwiError, OSError):
                real = await self._real()
                if real != self._known:
                    await self._lay(real)

    async def take_over(self, warn: Callable[[str], None]) -> None:
        """Bring what the server committed into the repository after its last call; warn if that is not possible."""
        async with self._lock:
            self._calls = max(0, self._calls - 1)
            if self._calls:
                return
            try:
                made = await asyncio.to_thread(self._read_copy)
                if made != self._mine(self._known):
                    await self._take(made)
                    await self._lay(await self._real())
            except (KiwiError, OSError) as fault:
                reason = fault.message if isinstance(fault, KiwiError) else str(fault)
                with suppress(KiwiError, OSError):
                    await self._lay(await self._real())
                warn(f"What was changed in {self.git} was not taken over: {reason}")

    async def _take(self, made: RepositoryState) -> None:
        known, is_replaced = self._known, made.index != self._known.index
        await asyncio.to_thread(self._stage)
        changed = {name: one for name, one in made.refs.items() if known.refs.get(name) != one}
        gone = [name for name in known.refs if name.startswith(_TAKEN) and name not in made.refs]
        tips = {*changed.values(), *([made.head] if _ID.fullmatch(made.head) else [])}
        entries, blobs = b"", set[str]()
        if is_replaced:
            # The entries of the server's index, and the contents in it that the owner's index does not have.
            entries = await self._ask("ls-files", "-s", "-z", env={"GIT_INDEX_FILE": str(self._staged / "index")})
            blobs = {*_contents(entries)} - {*_contents(await self._ask("ls-files", "-s", "-z"))}
        await self._bring_objects({*tips, *blobs})
        with _locked_index(f"{self.git}/index", known.index, is_replaced=is_replaced):
            if is_replaced:
                own = {"GIT_INDEX_FILE": str(self._staged / "new")}
                (self._staged / "new").unlink(missing_ok=True)
                # `update-index` writes nothing where there is no entry.
                words = ("update-index", "-z", "--index-info") if entries else ("read-tree", "--empty")
                await self._ask(*words, stdin=entries, env=own)
                # Copied, because the repository may be on another file system.
                await asyncio.to_thread(shutil.copyfile, self._staged / "new", f"{self.git}/index.lock")
            zero = "0" * len(next(iter(tips), "0" * 40))
            orders = [f"update {name}\0{one}\0{known.refs.get(name, zero)}\0" for name, one in changed.items()]
            orders += [f"delete {name}\0{known.refs[name]}\0" for name in gone]
            if orders:
                await self._ask("update-ref", "-z", "--stdin", stdin=os.fsencode("".join(orders)))
            await self._move_head(made.head)

    async def _move_head(self, head: str) -> None:
        if head == self._known.head:
            return
        branch = head.removeprefix("ref: ")
        if branch.startswith("refs/heads/") and await self._ask("check-ref-format", branch) == b"":
            await self._ask("symbolic-ref", "HEAD", branch)
        elif _ID.fullmatch(head):
            await self._ask("update-ref", "--no-deref", "HEAD", head)
        else:
            raise Unavailable("the head is neither a branch nor a commit.", suggestion="Check out a branch.")

    async def _bring_objects(self, wanted: set[str]) -> None:
        """Add what some objects consist of to the repository, once git has checked each of them."""
        if not wanted:
            return
        own = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._staged / "objects")}
        lines = [*sorted(wanted), *(f"^{one}" for one in sorted({*self._known.refs.values()}))]
        words = ("pack-objects", "-q", "--revs", "--stdout", "--window=0")
        pack = await self._ask(*words, stdin="\n".join((*lines, "")).encode(), env=own)
        await self._ask("index-pack", "--stdin", "--strict", stdin=pack)

    async def _real(self) -> RepositoryState:
        listed = (await self._ask("for-each-ref", "--format=%(objectname) %(refname)")).decode(errors="surrogateescape")
        rows = (line.partition(" ") for line in listed.splitlines())
        refs = {name: one for one, _, name in rows if not name.startswith(("refs/kiwi/", "refs/stash"))}
        return await asyncio.to_thread(self._read_real, refs)

    def _read_real(self, refs: Mapping[str, str]) -> RepositoryState:
        head = Path(self.git, "HEAD").read_text(encoding="utf-8", errors="surrogateescape").strip()
        return RepositoryState(head, refs, _digest(f"{self.git}/index"))

    @staticmethod
    def _mine(state: RepositoryState) -> RepositoryState:
        refs = {name: one for name, one in state.refs.items() if name.startswith(_TAKEN)}
        return RepositoryState(state.head, refs, state.index)

    def _create(self, settings: Mapping[str, str], algorithm: bytes) -> None:
        inner = (OBJECTS, "modules", "objects/info", "objects/pack", "info")
        for name in (*(f"copy/{one}" for one in inner), "staged/objects"):
            (self.folder.parent / name).mkdir(parents=True)
        is_long = algorithm.strip() == b"sha256"
        said = {name: settings.get(f"user.{name}", "Kiwi") for name in ("name", "email")}
        lines = [
            *("[core]", f"repositoryformatversion = {int(is_long)}", "bare = false", "logallrefupdates = true"),
            f"filemode = {'false' if settings.get('core.filemode') == 'false' else 'true'}",
            *(("[extensions]", "objectformat = sha256") if is_long else ()),
            *("[user]", *(f"{name} = {_quoted(value)}" for name, value in said.items())),
        ]
        (self.folder / "config").write_text("\n".join((*lines, "")), encoding="utf-8")
        (self.folder / "objects/info/alternates").write_text(f"{self.git}/{OBJECTS}\n", encoding="utf-8")
        for name in _PLAIN:
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{self.git}/{name}", self.folder / name)

    async def _lay(self, state: RepositoryState) -> None:
        """Write a state into the copy, in the place of what the server has there."""
        await asyncio.to_thread(self._write_copy, state)
        self._known = state

    def _write_copy(self, state: RepositoryState) -> None:
        packed = "".join(f"{one} {name}\n" for name, one in sorted(state.refs.items()))
        index = Path(self.git, "index").read_bytes() if state.index else None
        if index is not None and sha256(index).hexdigest() != state.index:
            raise Unavailable("the index changes at this moment.", suggestion="Call again.")
        texts = {"HEAD": os.fsencode(f"{state.head}\n"), "packed-refs": os.fsencode(packed), "index": index}
        with _opened(self.folder) as folder:
            for name in ("refs", *texts):
                self._discard(folder, name)
            os.mkdir("refs", 0o755, dir_fd=folder)
            for name, data in texts.items():
                if data is not None:
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                    with os.fdopen(os.open(name, flags, 0o644, dir_fd=folder), "wb") as file:
                        file.write(data)

    def _discard(self, folder: int, name: str) -> None:
        """Move what the server has under a name out of its reach, and delete it."""
        trash = self._staged / token_hex(8)
        with suppress(FileNotFoundError):
            os.rename(name, trash, src_dir_fd=folder)
            if trash.is_dir() and not trash.is_symlink():
                shutil.rmtree(trash, ignore_errors=True)
            else:
                trash.unlink()

    def _read_copy(self) -> RepositoryState:
        """Return what the server has made of the copy. No link is followed, and git is not asked."""
        with _opened(self.folder) as folder:
            packed = _read(folder, "packed-refs").decode(errors="surrogateescape").splitlines()
            rows = (line.partition(" ") for line in packed if not line.startswith(("#", "^")))
            refs = {name: one for one, _, name in rows}
            for where, files, at in _walk(folder, "refs"):
                for name in files:
                    if not name.endswith(".lock"):
                        refs[f"{where}/{name}"] = _read(at, name).decode(errors="replace").strip()
                if len(refs) > _MOST_FILES:
                    raise _too_large()
            head = _read(folder, "HEAD").decode(errors="surrogateescape").strip()
            index = _read(folder, "index")
        (self._staged / "index").write_bytes(index)
        made = self._mine(RepositoryState(head, refs, sha256(index).hexdigest() if index else ""))
        if odd := next((name for name, one in made.refs.items() if not _ID.fullmatch(one) or "\0" in name), None):
            raise Unavailable(f"{odd!r:.100} names no commit.", suggestion="Let the server make an ordinary branch.")
        return made

    def _stage(self) -> None:
        """Copy new objects of the server to where it cannot change them."""
        total = 0
        with _opened(self.folder) as folder:
            for count, (where, files, at) in enumerate(_walk(folder, "objects")):
                for name in files:
                    target = self._staged / where / name
                    if _OBJECT.fullmatch(f"{where}/{name}") and not target.exists():
                        data = _read(at, name)
                        total += len(data)
                        target.parent.mkdir(exist_ok=True)
                        target.write_bytes(data)
                if total > _MOST_BYTES or count > _MOST_FILES:
                    raise _too_large()

    async def _ask(self, *words: str, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> bytes:
        work = os.path.dirname(self.git)  # noqa: PTH120 - text
        where = (f"--git-dir={self.git}", f"--work-tree={work}", "-c", "core.logAllRefUpdates=true")
        result = await run_git((*where, *words), work, stdin, env)
        if result.exit_code != 0 or result.timed_out or result.is_truncated:
            raise git_failed(words[0], result)
        return result.stdout


@contextmanager
def _locked_index(index: str, known: str, *, is_replaced: bool) -> Iterator[None]:
    """Lock the owner's index as git does; at the end, a file that replaces the index may stand in the lock's place."""
    lock = Path(f"{index}.lock")
    os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    if is_replaced and _digest(index) != known:
        lock.unlink()
        raise Unavailable("the index was changed by another program.", suggestion="Call again.")
    try:
        yield
    except BaseException:
        lock.unlink(missing_ok=True)
        raise
    if is_replaced:
        lock.replace(index)
    else:
        lock.unlink(missing_ok=True)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


def _contents(entries: bytes) -> Iterator[str]:
    """Yield the contents that an index names; those of submodules are elsewhere."""
    for line in entries.split(b"\0"):
        mode, _, rest = line.partition(b" ")
        if rest and mode != _GITLINK:
            yield rest[: rest.index(b" ")].decode()


def _digest(path: str) -> str:
    with suppress(FileNotFoundError):
        return sha256(Path(path).read_bytes()).hexdigest()
    return ""


def _walk(around: int, name: str, path: str = "") -> Iterator[tuple[str, list[str], int]]:
    """Yield each folder at and below a name: its path, the names in it that are no folders, and the open folder.

    No link is followed, and nothing but folders is opened: opening a pipe would wait for its other end.
    """
    path = f"{path}/{name}" if path else name
    if path.count("/") > _DEEPEST:
        raise _too_large()
    try:
        opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=around)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        with os.scandir(opened) as found:
            entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
        yield path, [one for one, is_folder in entries if not is_folder], opened
        for one, is_folder in entries:
            if is_folder:
                yield from _walk(opened, one, path)
    finally:
        os.close(opened)


def _read(folder: int, name: str) -> bytes:
    """Return the content of a regular file in an open folder; nothing if there is no file."""
    try:
        opened = open_beneath(folder, name, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return b""
    with os.fdopen(opened, "rb") as file:
        state = os.fstat(opened)
        if not S_ISREG(state.st_mode) or state.st_size > _MOST_BYTES:
            raise _too_large()
        return file.read(_MOST_BYTES)


def _quoted(value: str) -> str:
    """Return a value as a git settings file has it."""
    plain = "".join(character for character in value if character.isprintable())
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _too_large() -> Unavailable:
    return Unavailable("it is too large, or no plain file.", suggestion="Commit it yourself.")
