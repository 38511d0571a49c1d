"""The root of a container: a folder with the places on which the system's files and what is given are mounted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.sandbox.prepared import Prepared
from kiwi_mcp.sandbox.profile import TMP, base_profile

_LARGEST = 1_048_576
_ENGINES_OWN = ("/etc/hostname", "/etc/resolv.conf", "/run/.containerenv")
"""Files that the engine mounts, for which it could make no place itself: it is nobody in the container's root."""


def made_root(place: Path, made: Prepared) -> Path:
    """Make the folder in a place of Kiwi's own."""
    root, profile = place / "root", base_profile()
    for folder in ("", "/dev", "/proc", "/sys", TMP):
        _make_folder(Path(f"{root}{folder}"))
    for path, target in profile.links.items():
        Path(f"{root}{path}").symlink_to(target)
    for path in profile.readable:
        if Path(path).is_dir():
            _make_folder(Path(f"{root}{path}"))
        else:
            with Path(path).open("rb") as file:
                _make_file(Path(f"{root}{path}"), file.read(_LARGEST))
    for path, content in (*profile.files.items(), *((path, b"") for path in _ENGINES_OWN)):
        _make_file(Path(f"{root}{path}"), content)
    for grant in made.granted:
        make = _make_folder if grant.is_folder else _make_file
        make(Path(f"{root}{grant.path}"))
    Path(f"{root}{TMP}").chmod(0o1777)
    _make_file(place / "nothing")
    return root


def mount_words(place: Path, made: Prepared, jail: Jail) -> Iterator[str]:
    """Yield what the engine is to mount: the system's folders, what is given, what covers it, and temporary folders."""
    for path in filter(_is_folder, base_profile().readable):
        yield _mount("bind", path, "ro", src=path)
    for grant in made.grants:
        yield _mount("bind", grant.path, "rw" if grant.is_writable else "ro", src=grant.path)
    for path in made.hidden:
        if _is_folder(path):
            yield _mount("tmpfs", path, "ro", "notmpcopyup")
        elif Path(path).exists():
            yield _mount("bind", path, "ro", src=str(place / "nothing"))
    for path in (TMP, "/dev/shm"):  # noqa: S108 - inside
        size = {"tmpfs-size": str(jail.limits.tmp_bytes), "tmpfs-mode": "1777"}
        yield _mount("tmpfs", path, "exec", "notmpcopyup", **size)


def _mount(kind: str, path: str, *modes: str, **words: str) -> str:
    """Return the option for one mount; its value is a row of comma-separated values, all of them quoted."""
    named = {"type": kind, "dst": path, **words}
    fields = [*(f"{name}={value}" for name, value in named.items()), *modes]
    return "--mount=" + ",".join('"{}"'.format(field.replace('"', '""')) for field in fields)


def _is_folder(path: str) -> bool:
    return Path(path).is_dir()


def _make_folder(path: Path) -> None:
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir()
        path.chmod(0o755)


def _make_file(path: Path, content: bytes = b"") -> None:
    _make_folder(path.parent)
    path.write_bytes(content)
    path.chmod(0o644)
