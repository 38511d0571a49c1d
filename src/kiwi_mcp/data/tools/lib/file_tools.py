"""The tools for the files of a project: `main` is the one that KIWI_TOOL_ID names.

It runs in a sandbox that has the project's folder and nothing else of the owner's. In there, too, no path leaves that
folder: every part is opened relative to the one before it, and links are refused.
"""

import errno
import os
import stat
import sys
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from hashlib import sha256

MAX_BYTES = 1_000_000
MOST_FILES, MOST_LISTED, MOST_MATCHES, LONGEST_MATCH, MOST_FOUND = 20_000, 1_000, 50, 500, 20_000
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def main(**given):
    action = os.environ["KIWI_TOOL_ID"].removeprefix("files_")
    path = given.pop("path", ".")
    try:
        return ACTIONS[action](path, **given)
    except FileNotFoundError:
        sys.exit(f"not_found: there is no {path!r}; files_list shows what there is")
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            sys.exit(f"permission_denied: {path!r} may not be used so, by the rules of the owner or its own mode")
        sys.exit(f"path_invalid: {path!r}: {error.strerror} (links are not followed)")


def read(path):
    data, found = content_of(path)
    try:
        content = data.decode()
    except UnicodeDecodeError:
        sys.exit(f"path_invalid: {path!r} is not text")
    return {"path": path, "content": content, "version": version_of(data), "modified_at": changed(found)}


def write(path, content, expected_version):
    return put(path, content.encode(), expected_version)


def edit(path, find, replace, expected_version):
    data, _ = check_version(path, expected_version)
    return put(path, data.replace(find.encode(), replace.encode()), expected_version)


def delete(path, expected_version):
    check_version(path, expected_version)
    with folder_of(path) as (folder, name):
        os.unlink(name, dir_fd=folder)
        os.fsync(folder)
    return {"path": path, "deleted": True}


def put(path, data, expected_version):
    """Have the whole new file or the old one, also if the machine stops meanwhile."""
    _, mode = check_version(path, expected_version)
    with folder_of(path, makes=True) as (folder, name):
        draft = f".{os.urandom(8).hex()}"
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fchmod(file, mode)
                os.fsync(file)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise
        os.fsync(folder)
    return {"path": path, "bytes_written": len(data), "version": version_of(data)}


def check_version(path, expected):
    """Return a file's content and mode; end if it is not the version that the owner was shown."""
    data, version, mode = b"", "new", 0o644
    with suppress(FileNotFoundError):
        data, found = content_of(path)
        version, mode = version_of(data), stat.S_IMODE(found.st_mode) & 0o777
    if version != expected:
        sys.exit(f"conflict: {path!r} was changed by another program meanwhile; read it again")
    return data, mode


def list_files(path, recursive=False):
    entries = [entry(*one) for one in below(path, recursive)]
    left = {"omitted_entries": len(entries) - MOST_LISTED} if len(entries) > MOST_LISTED else {}
    return {"path": path, "entries": entries[:MOST_LISTED], **left}


def search(path, query, type="content"):
    wanted, room, omitted, matches = query.casefold(), MOST_FOUND, 0, []
    for one, found in below(path, True):
        for number, line in [(0, one)] if type == "filename" else lines(one, found):
            if wanted not in line.casefold():
                continue
            text = line.strip()[:LONGEST_MATCH]
            if len(matches) >= MOST_MATCHES or len(text) > room:
                omitted += 1
                continue
            room -= len(text)
            matches.append({"path": one} if type == "filename" else {"path": one, "line": number, "text": text})
    return {"query": query, "matches": matches, "omitted_matches": omitted}


def lines(path, found):
    data = b""
    if stat.S_ISREG(found.st_mode) and found.st_size <= MAX_BYTES:
        with suppress(OSError):  # it is gone by now
            data = content_of(path)[0]
    return enumerate(data.decode(errors="replace").splitlines(), 1) if b"\0" not in data else ()


def entry(path, found):
    if stat.S_ISDIR(found.st_mode):
        return {"path": path, "type": "folder"}
    return {"path": path, "type": "file", "size": found.st_size, "modified_at": changed(found)}


def below(path, recursive):
    """Return the files and folders below a folder by their paths; links and hidden names are left out."""
    found, waiting = [], ["" if path == "." else path]
    while waiting and len(found) < MOST_FILES:
        where = waiting.pop()
        unread = suppress(OSError) if found else nullcontext()  # one that may not be read hides itself alone
        with unread, folder_of(f"{where}/." if where else ".") as (folder, _), os.scandir(folder) as entries:
            for one in entries:
                try:
                    state = one.stat(follow_symlinks=False)
                except FileNotFoundError:  # it is gone by now
                    continue
                is_folder = stat.S_ISDIR(state.st_mode)
                if one.name.startswith(".") or not (is_folder or stat.S_ISREG(state.st_mode)):
                    continue
                inner = f"{where}/{one.name}" if where else one.name
                found.append((inner, state))
                if recursive and is_folder:
                    waiting.append(inner)
    return sorted(found, key=lambda one: one[0])


def content_of(path):
    with folder_of(path) as (folder, name), os.fdopen(os.open(name, FILE, dir_fd=folder), "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode):
            sys.exit(f"path_invalid: {path!r} is not a file")
        if found.st_size > MAX_BYTES:
            sys.exit(f"too_large: {path!r} has {found.st_size:,} bytes, and at most {MAX_BYTES:,} are read")
        return stream.read(MAX_BYTES), found


@contextmanager
def folder_of(path, makes=False):
    """Yield the open folder that a path lies in, and its name in it."""
    *folders, name = path.split("/")
    here = os.open(os.environ["KIWI_PROJECT"], FOLDER)
    try:
        for part in folders:
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
            inner = os.open(part, FOLDER, dir_fd=here)
            os.close(here)
            here = inner
        yield here, name
    finally:
        os.close(here)


def version_of(data):
    return sha256(data).hexdigest()[:16]


def changed(found):
    at = datetime.fromtimestamp(found.st_mtime, timezone.utc)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


ACTIONS = {"read": read, "write": write, "edit": edit, "delete": delete, "list": list_files, "search": search}
