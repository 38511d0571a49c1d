"""Where variables come from, `.env` files among them, and the substitution of `${NAME}` by their values."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from errno import ENXIO
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NoReturn, TypeAlias
from urllib.parse import quote

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest, TooLarge, VariableMissing
from kiwi_mcp.domain.json import Json, map_texts
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.secret import Secret

SecretForm: TypeAlias = Literal["header", "env", "any"]
"""Where a value may be put: into headers of requests, into the environment of processes, or anywhere."""
FORMS: tuple[SecretForm, ...] = ("header", "env", "any")

_REFERENCE = lazy_pattern(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_PROCESS = "process"
_SECRET_NAME = lazy_pattern(r"(?i)pass|secret|token|key|credential|cookie|auth")
_UNBOUND: Mapping[str, SecretScope] = MappingProxyType({})
ENV_FILE_LIMIT = 1_000_000
"""The most bytes an `.env` file may have."""
_VARIABLE = lazy_pattern(r"[A-Za-z_][A-Za-z0-9_]*")


class FoundVariable(Struct, frozen=True):
    """A variable's value and the place it was found in."""

    source: str
    value: Secret


class SecretScope(Struct, frozen=True):
    """What holds a stored secret: the hosts that requests may carry it to, and the form it may have."""

    hosts: tuple[str, ...] = ()
    form: SecretForm = "env"


class Revealed(Mapping[str, str]):
    """Values by name, for the primitives; its own text shows the names alone."""

    def __init__(self, found: Mapping[str, FoundVariable], bounds: Mapping[str, SecretScope] = _UNBOUND) -> None:
        self._values = {name: one.value.reveal() for name, one in found.items()}
        self.bounds = bounds
        """What holds those of the values that are stored secrets."""

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Revealed({', '.join(self._values)})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("Secrets are not written anywhere.")


class Variables:
    """The places variables come from: the process, then the project's files, then the user's.

    A name with an empty value counts as not set there: the next place is asked, and no request ever carries an
    empty secret.
    """

    def resolve(
        self,
        names: Iterable[str],
        *,
        project: Path,
        user: Path,
        environ: Mapping[str, str] | None = None,
        optional: Iterable[str] = (),
        needed_by: str = "the call",
    ) -> Mapping[str, FoundVariable]:
        """Return each name's value, and of `optional` those that are found; a name that is set nowhere is an error."""
        needed = tuple(dict.fromkeys(names))
        found = _find((*needed, *optional), _places(project, user, environ))
        if missing := [name for name in needed if name not in found]:
            raise VariableMissing(missing, needed_by=needed_by)
        return found

    def every(self, *, project: Path, user: Path, environ: Mapping[str, str] | None = None) -> Revealed:
        """Return all values from files, and the values of process variables with names that look like secrets."""
        found: dict[str, FoundVariable] = {}
        for source, values in _places(project, user, environ):
            for name, value in values.items():
                if value and (source != _PROCESS or _SECRET_NAME.search(name)):
                    found[f"{name}@{source}"] = FoundVariable(source, Secret(value))
        return Revealed(found)

    def locate(
        self, names: Iterable[str], *, project: Path, user: Path, environ: Mapping[str, str] | None = None
    ) -> Mapping[str, str | None]:
        """Return where each name would come from, without its value; None where it is set nowhere."""
        wanted = tuple(names)
        found = _find(wanted, _places(project, user, environ))
        return {name: found[name].source if name in found else None for name in wanted}


def reveal(text: str, secrets: Mapping[str, str], *, needed_by: str = "the call") -> str:
    """Return the text with values in place of names, in one pass from left to right.

    `${NAME}` is a value, `${NAME:-default}` a value or the default, and `$${` is the text `${`: a caller's own words
    were written with it, so they are never taken for names. What was put in is not looked at again.
    """
    return _REFERENCE.sub(lambda found: _value(found, secrets, needed_by), text) if "${" in text else text


def reveal_url(text: str, secrets: Mapping[str, str]) -> str:
    """Return a URL with values in place of names; within its path and query they are quoted, so they stay one part."""
    done, at = "", 0
    for found in _REFERENCE.finditer(text):
        done += text[at : found.start()]
        done += _quoted(_value(found, secrets, "the request"), done) if found[1] else "${"
        at = found.end()
    return done + text[at:]


def reveal_json(value: Json, secrets: Mapping[str, str]) -> Json:
    """Return a JSON value with each of its strings revealed, so that no value can break out of its string."""
    return map_texts(value, lambda text: reveal(text, secrets))


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of variables that a text refers to."""
    return tuple(dict.fromkeys(found[1] for found in _REFERENCE.finditer(text) if found[1]))


def _value(found: re.Match[str], secrets: Mapping[str, str], needed_by: str) -> str:
    name, default = found.groups()
    if name is None:
        return "${"
    if known := secrets.get(name):
        return known
    if default is None:
        raise VariableMissing([name], needed_by=needed_by)
    return str(default)


def _quoted(value: str, before: str) -> str:
    """Return a value as it is written at this place of a URL; one that is its beginning stays as it is."""
    rest = before.partition("://")[2]
    if "?" in rest:
        return quote(value, safe="")
    return quote(value, safe="/:@!$&'()*+,;=~") if "/" in rest else value


def _find(names: Iterable[str], places: Iterator[tuple[str, Mapping[str, str]]]) -> dict[str, FoundVariable]:
    """Return the first value of each name; places are read only as long as a name is left."""
    found: dict[str, FoundVariable] = {}
    left = dict.fromkeys(names)
    while left and (place := next(places, None)) is not None:
        source, values = place
        for name in [name for name in left if values.get(name)]:
            found[name] = FoundVariable(source, Secret(values[name]))
            del left[name]
    return found


def _places(project: Path, user: Path, environ: Mapping[str, str] | None) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield _PROCESS, os.environ if environ is None else environ
    for path in (project / ".env.local", project / ".env", project / ".ai" / ".env"):
        # A project may be untrusted: a link in it must not make another file's lines into variables.
        if path.is_symlink() and not path.resolve().is_relative_to(project.resolve()):
            continue
        yield str(path), read_env_file(path)
    yield str(user / ".env"), read_env_file(user / ".env")


def read_env_file(path: Path) -> Mapping[str, str]:
    """Return the variables of a file; none where there is no such file."""
    try:
        # Without blocking, so that a FIFO of this name cannot hold Kiwi up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as fault:
        if fault.errno == ENXIO:  # a socket: the placeholder that keeps the name free while a sandbox is running
            return {}
        raise _unreadable(path, fault.strerror or "unknown fault") from fault
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _unreadable(path, "it is not a regular file")
        data = os.read(descriptor, ENV_FILE_LIMIT + 1)
    finally:
        os.close(descriptor)
    if len(data) > ENV_FILE_LIMIT:
        raise TooLarge(f"{path.name} in {path.parent}", size=max(status.st_size, len(data)), limit=ENV_FILE_LIMIT)
    try:
        return parse_env(data.decode("utf-8-sig"))
    except UnicodeDecodeError as fault:
        raise _unreadable(path, "it is not UTF-8") from fault


def parse_env(text: str) -> Mapping[str, str]:
    """Return the variables of a text; the last line of a name wins, and lines that are no assignment are skipped."""
    found: dict[str, str] = {}
    for line in re.split(r"\r\n|\r|\n", text):
        name, assigned, value = line.strip().removeprefix("export ").partition("=")
        if assigned and _VARIABLE.fullmatch(name.strip()):
            plain = value.strip()
            if plain[:1] in {'"', "'"}:
                plain = plain[1:].partition(plain[0])[0]
            else:
                plain = "" if plain.startswith("#") else re.split(r"\s#", plain, maxsplit=1)[0].rstrip()
            found[name.strip()] = plain
    return found


def _unreadable(path: Path, reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"{path} cannot be read: {reason}.",
        suggestion="Make it a UTF-8 text file that you can read, or move it away.",
        path=str(path),
    )
