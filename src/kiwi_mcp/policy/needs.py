"""What the sandbox is given: declared needs, command files, the paths that the entry of an MCP server implies."""

from __future__ import annotations

import os
import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied, Unavailable
from kiwi_mcp.domain.grants import (
    EVERYWHERE,
    Allow,
    Deny,
    ResourceKind,
    Rights,
    Rules,
    Verdict,
    address_of,
    begun,
    fits_path,
    is_met,
    is_plain,
    match_rules,
    onward,
)
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Needs, together
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.manifest.mcp import launch_command
from kiwi_mcp.primitives.http.addresses import refusal
from kiwi_mcp.sandbox.command_files import files_of_command, is_in_any, is_too_wide, script_in
from kiwi_mcp.sandbox.levels import base_profile
from kiwi_mcp.sandbox.process_setup import is_placeholder
from kiwi_mcp.sandbox.quarantine import entries_of

HOME = "~/"
MOST_ENTRIES = 20_000
"""How many entries below one folder are searched for one call; beyond that, only down to the depth `NEAR`."""
NEAR = 4
_MOST_NEAR = 200_000
_MOST_KEPT = 256
"""Each costs a mount in a sandbox."""
_UNSEARCHED = (".git", ".hg")
"""Large folders without files of the owner."""
_SPECIAL = lazy_pattern(r"([*?[])")
_LOCAL = ("localhost", "localhost.localdomain")
_FIX = "The owner's rules are in policy.yaml of the user space; see `kiwi help policy`."
_WORDS = {
    "read": "read",
    "write": "change",
    "hosts": "reach",
    "commands": "start",
    "client": "ask the clients that call it for",
    "sockets": "make sockets of the kind",
}
_DATA = frozenset({".db", ".sqlite", ".sqlite3", ".duckdb", ".jsonl", ".log"})
"""The endings of files that a program changes."""


class TooMany(Exception):
    """There is more below a folder than is looked through for one call."""


def is_pattern(text: str) -> bool:
    """Whether a text can stand for files: below the project, below `~/`, or from the root; never upwards."""
    return bool(text) and ".." not in text.split("/") and "\0" not in text and not re.match(r"~(?!/)", text)


def plain_path(pattern: str) -> str:
    """Return a pattern without what means nothing in it: `./docs/` is `docs`, and `.` all of the project."""
    text = str(PurePosixPath(pattern))
    return "**" if text == "." else text


def placed(text: str, project: str) -> str:
    """Return a path from the root: relative ones begin in the project, and those with `~/` in the home."""
    if text.startswith(HOME):
        return f"{os.path.realpath(Path.home())}/{text.removeprefix(HOME)}"
    return text if text.startswith("/") else f"{project}/{text}"


def is_outside(pattern: str, project: str) -> bool:
    """Whether a pattern can only match paths outside of the project."""
    first = os.path.realpath(_plain_part(placed(pattern, project))[0])
    return not (Path(first).is_relative_to(project) or Path(project).is_relative_to(first))


def anchored(pattern: str, project: str) -> tuple[str, ...]:
    """Return a pattern as an absolute one, and a second one with links resolved if its fixed part contains links.

    A rule that denies the target of a link must also match a path that names the target directly.
    """
    base = _SPECIAL.sub(r"[\1]", project)
    home = _SPECIAL.sub(r"[\1]", os.path.realpath(Path.home()))
    below = pattern.removeprefix(HOME)
    text = pattern if pattern.startswith("/") else f"{home if below != pattern else base}/{below}"
    first, rest = _plain_part(pattern if pattern.startswith("/") else placed(pattern, project))
    real = os.path.realpath(first)
    return (text,) if real == first else (text, "/".join([_SPECIAL.sub(r"[\1]", real), *rest]))


def below(folder: str, patterns: Iterable[str]) -> Iterator[str]:
    """Yield the paths below a folder that match a pattern. Links are not followed."""
    met = {pattern: begun(pattern) for pattern in patterns}
    for name in filter(None, folder.split("/")):
        met = {pattern: onward(pattern, places, name) for pattern, places in met.items()}
    waiting = [(folder, {pattern: places for pattern, places in met.items() if places})]
    seen = 0
    while waiting:
        where, here = waiting.pop()
        for entry in entries_of(where) if here else ():
            seen += 1
            if seen > MOST_ENTRIES:
                raise TooMany
            there = {pattern: onward(pattern, places, entry.name) for pattern, places in here.items()}
            if any(is_met(pattern, places) for pattern, places in there.items()):
                yield entry.path
            elif entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, {pattern: places for pattern, places in there.items() if places}))


class ProtectedFiles(Struct, frozen=True):
    """The paths below a folder that are protected because of their name, at any depth."""

    secrets: tuple[str, ...]
    """`.env` and `.env.*`: variables of the owner's."""
    credentials: tuple[str, ...]
    """What package managers and the like log in with."""
    obeyed: tuple[str, ...]
    """Files that other programs run or obey, except those directly in the folder."""
    is_whole: bool
    """Whether the whole folder was searched; otherwise only the near part."""


def is_secret(name: str) -> bool:
    """Whether a file holds secrets by its very name."""
    return name == ".env" or name.startswith(".env.")


def protected_files(folder: str) -> ProtectedFiles:
    """Return the paths below a folder that are protected by name.

    The near part is searched first, so that many files far down or elsewhere cannot hide a near one.
    """
    stays = base_profile().stays_below
    secrets, credentials, held = list[str](), list[str](), list[str]()
    waiting, seen, is_whole = deque([(folder, 0, False)]), 0, True
    while waiting:
        where, depth, is_held = waiting.popleft()
        if seen > MOST_ENTRIES and depth >= NEAR:
            is_whole = False
            break
        for entry in entries_of(where):
            seen += 1
            name, is_met = entry.name, False
            if name.startswith(".") and not is_placeholder(entry.path):
                is_met = depth > 0 and not is_held and stays(name)
                if is_met:
                    held.append(entry.path)
                if is_secret(name):
                    secrets.append(entry.path)
                    continue
                if name in (".netrc", ".npmrc", ".pypirc"):
                    credentials.append(entry.path)
            if entry.is_dir(follow_symlinks=False) and name not in _UNSEARCHED:
                waiting.append((entry.path, depth + 1, is_held or is_met))
        if seen > _MOST_NEAR or len(secrets) + len(held) > _MOST_KEPT:
            raise TooMany
    return ProtectedFiles(tuple(secrets), tuple(credentials), tuple(held), is_whole)


def _plain_part(pattern: str) -> tuple[str, list[str]]:
    names = pattern.split("/")
    plain = next((place for place, name in enumerate(names) if not is_plain(name)), len(names))
    return "/".join(names[:plain]) or "/", names[plain:]


class ProcessAccess(Struct, frozen=True):
    """The owner's resources that a process may access, with the field names of its sandbox base."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    denied_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """What could not be looked through to its end."""


def reach(needs: Needs, rights: Rights, space: Space) -> ProcessAccess:
    """Return the access that a process needs, or refuse it with the rule that denies it.

    Each path is given completely or not at all. Paths inside a folder that rules deny are hidden, or read-only.
    """
    for command in needs.commands:
        _demand(rights, "command", command)
    access = ProcessAccess()
    if needs.read or needs.write:
        rules = FileRules(rights, space)
        readable = [path for text in needs.read if os.path.lexists(path := rules.given("read", text))]
        wanted = {rules.given("write", text): text for text in needs.write}
        writable = [path for path in wanted if os.path.lexists(path)]
        for path, text in wanted.items():
            if not _is_below(path, writable):  # a path that is missing may lie in a folder that is there
                raise Unavailable(
                    f"{text!r}, which the item needs to write, is not there.",
                    suggestion=f"Create it (`mkdir -p {path}`), or let the item need the folder that it would lie in.",
                    path=path,
                )
        hidden = [path for folder in (*readable, *writable) for path in rules.inside("read", folder)]
        kept = [path for folder in writable for path in rules.inside("write", folder) if path not in hidden]
        access = rules.reach([*readable, *kept], writable, hidden)
    for host in needs.hosts:
        _demand(rights, "host", host)
        refuse_private_host(rights, host)
    if not needs.hosts:
        return access
    return replace(access, hosts=needs.hosts, denied_hosts=rights.hosts.deny, private_hosts=rights.hosts.allow)


def command_access(
    named: Mapping[str, Sequence[str]],
    programs: Sequence[str],
    profile: SandboxProfile,
    rights: Rights,
    space: Space,
    *,
    is_owners: bool,
) -> ProcessAccess:
    """Return the access that a command gets, or refuse it.

    `named` are the paths that it names, each with the files around it; `programs` the files that its program needs;
    `profile` has the access that it already has. A command that the owner did not write may only name paths in the
    project and paths that it declares.
    """
    rules = FileRules(rights, space)
    readable = [
        one for path, around in named.items() for one in rules.around(path, around, profile, is_owners=is_owners)
    ]
    readable += rules.unrefused(programs)
    hidden = [path for folder in readable for path in rules.inside("read", folder, is_declared=False)]
    return rules.reach(readable, (), hidden)


class FileRules:
    """The rules about files of all grants, with every path from the root."""

    def __init__(self, rights: Rights, space: Space) -> None:
        self._project = os.path.realpath(space.project)
        self._cache = os.path.realpath(space.cache)
        own = (str(space.user), os.path.realpath(space.user), str(space.memory), os.path.realpath(space.memory))
        self._own = tuple(dict.fromkeys((*own, self._cache)))
        self._kept: dict[str, ProtectedFiles] = {}
        self._rules: dict[ResourceKind, tuple[tuple[str, Rules], ...]] = {
            kind: tuple(
                (grant.name, self._from_root(grant.rules(kind), is_owners=place == 0))
                for place, grant in enumerate(rights.grants)
            )
            for kind in ("read", "write")
        }

    def given(self, kind: ResourceKind, text: str) -> str:
        """Return the path of a need, if it may be given."""
        path = self._checked_path(kind, text)
        for name, rules in self._rules[kind]:
            if (refused := rules.match(path, kind)) is not None:
                raise _denied(kind, path, refused, name)
        # A writable path is readable as well, without a rule that allows it; a rule that denies reading still applies.
        for name, rules in self._rules["read"] if kind == "write" else ():
            if refused := rules.match(path, "read"):
                raise _denied("read", path, refused, name)
        return path

    def around(self, path: str, around: Sequence[str], profile: SandboxProfile, *, is_owners: bool) -> Sequence[str]:
        """Return the files to give around a path that a command names; none if the path is given already."""
        if _is_below(path, (*profile.readable, *profile.writable)) or self._is_own(path):
            return ()
        if not _is_below(path, [self._project]) and (not is_owners or is_private(path)):
            raise PolicyDenied(
                f"Its command names {path!r}, which is not of the project, and which it does not declare.",
                suggestion=f"If the owner means it, declare it: `needs: {{read: [{path}]}}`.",
                path=path,
            )
        return self.unrefused(around)

    def unrefused(self, paths: Sequence[str]) -> Sequence[str]:
        """Return paths that need no rule which allows them, without Kiwi's own; one that a rule denies is refused."""
        for path in paths:
            for name, rules in self._rules["read"]:
                if refused := next((rule for rule in rules.deny if fits_path(rule, path)), None):
                    raise _denied("read", path, refused, name)
        return [path for path in paths if not self._is_own(path)]

    def verdicts(self, kind: ResourceKind, text: str) -> tuple[Verdict, ...]:
        """Return the verdict of each grant on a path."""
        path = self._checked_path(kind, text)
        return tuple(
            Allow(name, match_rules(rules, kind, path)[1])
            if (refused := rules.match(path, kind)) is None
            else Deny(_denied(kind, path, refused, name).message, refused, name)
            for name, rules in self._rules[kind]
        )

    def inside(self, kind: ResourceKind, folder: str, *, is_declared: bool = True) -> Iterator[str]:
        """Yield the paths below a given folder that must not be given with it, because of a rule or of their name.

        In a folder that is only named by a command, these include the credentials of package managers.
        """
        if not os.path.isdir(folder):  # noqa: PTH112 - text, as all that is on the way of every call
            return
        denied = dict.fromkeys(rule for _, rules in self._rules[kind] for rule in rules.deny)
        try:
            if folder not in self._kept:
                self._kept[folder] = protected_files(folder)
            kept = self._kept[folder]
            named = kept.obeyed if kind == "write" else (*kept.secrets, *self._own)
            logins = () if is_declared else kept.credentials
            for path in (*named, *logins, *below(folder, denied)):
                # What a link leads to is what it keeps; the link itself shows nothing that is not given.
                real = os.path.realpath(path)
                if Path(real).is_relative_to(folder) and os.path.lexists(real):
                    yield real
        except TooMany:
            raise PolicyDenied(
                f"{folder!r} holds too many files to find those that must not be given with it.",
                suggestion="Let the item need a smaller folder, or deny folders by their names, without `**`.",
            ) from None

    def reach(self, readable: Sequence[str], writable: Sequence[str], hidden: Sequence[str]) -> ProcessAccess:
        """Return the access, with a warning for each folder that was not searched completely."""
        warnings = tuple(
            f"{folder!r} holds more than {MOST_ENTRIES:,} files: deeper than {NEAR} folders down, `.env` files are not "
            "hidden in it, and what other programs obey is not held"
            for folder, kept in self._kept.items()
            if not kept.is_whole
        )
        given, written, kept_from = (tuple(dict.fromkeys(paths)) for paths in (readable, writable, hidden))
        return ProcessAccess(given, written, kept_from, warnings=warnings)

    def _is_own(self, path: str) -> bool:
        """Whether a path is Kiwi's own; where there is no project, an empty folder of the cache stands for one."""
        if not _is_below(path, self._own):
            return False
        return not (_is_below(path, [self._project]) and _is_below(self._project, [self._cache]))

    def _checked_path(self, kind: ResourceKind, text: str) -> str:
        """Return the path of a need, unless it is Kiwi's own, holds secrets, or must not be changed."""
        plain = text.removesuffix("/**").removesuffix("/") or "/"
        path = self._project
        if plain not in {"**", "."}:
            path = os.path.normpath(placed(plain, self._project))
            if not is_pattern(plain):
                raise PolicyDenied(f"{text!r} names no files that could be given.", suggestion="Write it without `..`.")
            if (real := os.path.realpath(path)) != path:
                raise PolicyDenied(
                    f"{text!r} leads through a link to {real!r}, and links are not followed.",
                    suggestion="Name in `needs` what the link leads to.",
                )
        if self._is_own(path):
            raise PolicyDenied(
                f"{text!r} is in Kiwi's own folder, which nothing is given.",
                suggestion="Let the item need a folder of the project, or of your home.",
            )
        if is_secret(Path(path).name):
            raise PolicyDenied(
                f"{text!r} holds secrets, which are given by name and not by file.",
                suggestion="Declare the variables: `variables: [NAME]` under `config`, or `${NAME}`.",
            )

        # The project itself may lie in such a folder, as work trees of editors do.
        inner = Path(path).relative_to(self._project) if _is_below(path, [self._project]) else Path(path)
        name = next((part for part in inner.parts if base_profile().is_protected(part)), None)
        if kind == "write" and name:
            raise PolicyDenied(
                f"{text!r} is of {name!r}, which other programs run or obey, and which nothing is given to change.",
                suggestion="Let the item need another folder to write to; `needs.read` may name it.",
            )
        return path

    def _from_root(self, rules: Rules, *, is_owners: bool) -> Rules:
        """Return rules with absolute patterns.

        If the owner's list of allowed places is all outside of the project, it leaves the project as it is.
        """
        allowed = rules.allow
        if is_owners and allowed and all(is_outside(pattern, self._project) for pattern in allowed):
            allowed = (*EVERYWHERE.allow, *allowed)
        allow, deny = (
            tuple(one for pattern in patterns for one in anchored(pattern, self._project))
            for patterns in (allowed, rules.deny)
        )
        return Rules(allow, deny)


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def is_private(path: str) -> bool:
    """Whether a path is in a folder of the home that is hidden, as those with keys and settings are."""
    home = os.path.realpath(Path.home())
    return path.startswith(f"{home}/.")


def _demand(rights: Rights, kind: ResourceKind, resource: str) -> None:
    match rights.verdict(kind, resource):
        case Deny(reason=reason, rule=rule, grant=grant):
            raise PolicyDenied(f"It needs what it may not have: {reason}.", suggestion=_FIX, rule=rule, grant=grant)


def refuse_private_host(rights: Rights, host: str) -> None:
    """Refuse an address that is not public and that the owner did not name; what names lead to is seen later."""
    has_port = host.count(":") == 1 or "]:" in host
    name, _, port = host.strip("[").replace("]", "").rpartition(":") if has_port else (host, "", "")
    is_local = name in _LOCAL
    if not is_local and address_of(name) is None:
        return
    shown = "127.0.0.1" if is_local else name
    number = int(port) if port.isdigit() else 0
    if refusal(shown, host=name, port=number, granted=rights.hosts.allow):
        raise PolicyDenied(
            f"It needs {host!r}, which is not on the public network.",
            suggestion=f"If the owner means it, add {host!r} to `hosts.allow` in policy.yaml of the user space.",
        )


def _denied(kind: ResourceKind, path: str, rule: str, grant: str) -> PolicyDenied:
    why = f"the rule {rule!r} of {grant} denies it" if rule else f"no rule of {grant} allows it"
    wanted = f"files.{kind}.allow"
    return PolicyDenied(
        f"It needs to {kind} {path!r}, and {why}.",
        suggestion=_FIX if rule else f"If the owner means it, add {path!r} to `{wanted}`. {_FIX}",
        rule=rule,
        grant=grant,
    )


def with_needs(manifest: JsonObject, *needs: Needs) -> JsonObject:
    """Return a manifest that declares these needs besides its own."""
    found = together((Needs.from_json(manifest.get("needs")), *needs)).to_json()
    return {**manifest, "needs": found} if found else manifest


def needs_text(needs: Needs) -> str:
    """Return needs in words, for the end of a sentence; nothing where there are none."""
    response = [f"{verb} {', '.join(asked)}" for word, verb in _WORDS.items() if (asked := getattr(needs, word))]
    return f"; it may {' and '.join(response)}" if response else ""


def needs_named(config: JsonObject, issues: list[Issue], *, server: str = "NAME", project: Path | None = None) -> Needs:
    """Return the needs that the entry of a server implies, and those that are known of it.

    An absolute path is a folder to change or a file to read; of a file that is missing or holds data, the folder around
    it is one to change. A whole home folder is never given, hidden folders of the home only if they are known of the
    server, and to the entry of a `project` nothing outside of it. Each path that is not given is an issue.
    """
    if config.get("transport") != "stdio":
        return Needs()
    argv = (as_text(config.get("command")), *map(text_of, as_list(config.get("args"))))
    spec = ProcessSpec(argv, cwd="/", env={})
    script = script_in(spec)
    named = files_of_command(spec, has_folder=False).named
    read: list[str] = []
    write: list[str] = []
    for folder in (folder for path, around in named.items() if is_private(path) for folder in around):
        if project is None:
            read.append(folder)
        else:
            issues.append(_not_given(folder, server, "read"))
    known = launch_command.server_in(config)
    # The folders that the table of well-known servers names for it, also as defaults of variables.
    texts = (*known.folders, *known.env.values()) if known else ()
    listed = [str(write_place(path)) for text in texts for path in _paths(text)]
    options = zip(("", *argv), argv, range(len(argv)), strict=False)
    words = [(option, word) for option, word, place in options if place and place != script]
    words += [(name, text_of(value)) for name, value in as_object(config.get("env")).items()]
    words += [("", folder) for folder in known.folders] if known else []
    for name, word in words:
        for path in _paths(word):
            option = word.partition("=")[0] if word.startswith("-") else name
            is_data = path.suffix.lower() in _DATA or (known is not None and option in known.files)
            place = write_place(path) if is_data or not path.exists() else path
            if is_too_wide(place):
                fix = (
                    "Name the folders in it that it needs: `kiwi mcp allow NAME --write FOLDER`."
                    if place == path
                    else f"Move {path.name} to a folder of its own, and change the entry."
                )
                issues.append(Issue("needs", f"{place} is more than a server is given", fix, "warning"))
            elif not base_profile().covers(str(place)):
                access = "write" if place.is_dir() or not place.exists() else "read"
                is_outside = project is not None and not place.is_relative_to(os.path.realpath(project))
                if (is_outside or is_private(str(place))) and not is_in_any(place, listed):
                    issues.append(_not_given(str(place), server, access))
                else:
                    (write if access == "write" else read).append(str(place))
    hosts, sockets = (known.hosts, known.sockets) if known else ((), ())
    if known:
        read += [str(path) for text in known.reads if (path := Path(text).expanduser()).exists()]
    # What lies in a folder that may be changed may be changed too.
    only_read = [path for path in read if not is_in_any(Path(path), write)]
    read_once, write_once, hosts_once = (tuple(dict.fromkeys(texts)) for texts in (only_read, write, hosts))
    return Needs(read_once, write_once, hosts_once, sockets=sockets)


def write_place(path: Path) -> Path:
    """Return the path to give for changing one: a folder, or the folder around a file, where its other files go too."""
    return path if path.is_dir() or (not path.exists() and not path.suffix) else path.parent


def make_folders(needs: Needs, project: Path) -> None:
    """Make the folders that are to be changed and are not there."""
    for text in needs.write:
        path = Path(placed(text, str(project)))
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True) if not path.exists() else None
        except OSError as fault:
            raise InvalidRequest(
                f"{text!r} cannot be made: {fault.strerror}.", suggestion="Make it yourself, or name another folder."
            ) from fault


def _not_given(path: str, server: str, access: str) -> Issue:
    """Return the warning about a path that an entry names and that only the owner can allow."""
    fix = f"If it needs that: `kiwi mcp allow {server} --{access} {shlex.quote(path)}`."
    return Issue("needs", f"{path} is not given to {server} by its entry alone", fix, "warning")


def _paths(word: str) -> Iterator[Path]:
    """Yield the paths in a word, also behind `=`, with links followed; one that is missing counts if it can be made."""
    text = word.rpartition("=")[2] if word.startswith("-") else word
    parts = re.split(r"[:,](?=[/~])", text)
    if "${" in text or not all(part.startswith(("/", "~/")) for part in parts):
        return
    for part in parts:
        try:
            path = Path(os.path.realpath(Path(part).expanduser()))
            if path.is_dir() or path.is_file() or (not path.exists() and _may_be_made(path)):
                yield path
        except (OSError, ValueError, RuntimeError):  # a word that only looks like a path
            continue


def _may_be_made(path: Path) -> bool:
    """Whether a missing path lies in a folder of this user: the home, or one that is narrower than a home."""
    around = next(folder for folder in path.parents if folder.exists())
    is_owners = around == Path(os.path.realpath(Path.home())) or not is_too_wide(around)
    return is_owners and around.is_dir() and os.access(around, os.W_OK) and not base_profile().covers(str(around))
