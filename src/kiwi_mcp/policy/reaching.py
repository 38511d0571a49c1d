"""Reaching: what an item needs of the owner's, held against what it may have: the paths and hosts that it is given."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import PolicyDenied, Unavailable
from kiwi_mcp.domain.globs import address_of, fits_path
from kiwi_mcp.domain.grants import Allow, Deny, Kind, Rights, Rules, Verdict, ruling
from kiwi_mcp.domain.needs import Needs
from kiwi_mcp.policy.paths import TooMany, anchored, below, is_pattern, placed
from kiwi_mcp.primitives.addresses import refusal

_MOST_ENTRIES = 20_000
_LOCAL = ("localhost", "localhost.localdomain")
_SECRET_NAMES = (".env", ".env.*")
"""Files that hold secrets by their very name, in the folders that are given and in the project."""
_FIX = "The owner's rules stand in policy.yaml of the user space; `kiwi help policy` tells of them."


@dataclass(frozen=True, slots=True)
class Reach:
    """The part of the owner's that a process is given, in the words of its jail."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    denied_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()


NOTHING = Reach()


def reach(needs: Needs, rights: Rights, space: Space) -> Reach:
    """Return what is given to a process that needs something, or refuse it with the rule that does not let it have it.

    Each path is given wholly or not at all; what rules deny inside of a folder is hidden in it, or read-only.
    """
    for command in needs.commands:
        _demand(rights, "command", command)
    files = _files(needs, rights, space) if needs.read or needs.write else NOTHING
    if not needs.hosts:
        return files
    for host in needs.hosts:
        _demand(rights, "host", host)
        _demand_public(rights, host)
    hosts = rights.hosts
    return Reach(files.readable, files.writable, files.hidden, needs.hosts, hosts.deny, hosts.allow)


def _files(needs: Needs, rights: Rights, space: Space) -> Reach:
    rules = _FileRules(rights, space)
    readable = [path for text in needs.read if os.path.lexists(path := rules.given("read", text))]
    wanted = {rules.given("write", text): text for text in needs.write}
    writable = [path for path in wanted if os.path.lexists(path)]
    _refuse_absent(wanted, writable)
    hidden = [path for folder in (*readable, *writable) for path in rules.inside("read", folder)]
    kept = [path for folder in writable for path in rules.inside("write", folder) if path not in hidden]
    return Reach(*(tuple(dict.fromkeys(paths)) for paths in ([*readable, *kept], writable, hidden)))


def path_verdicts(kind: Kind, text: str, rights: Rights, space: Space) -> tuple[Verdict, ...]:
    """Return what each grant says of a path that is needed."""
    return _FileRules(rights, space).verdicts(kind, text)


class _FileRules:
    """The rules about files of all grants, with every path from the root."""

    def __init__(self, rights: Rights, space: Space) -> None:
        self._project = os.path.realpath(space.project)
        self._own = tuple(dict.fromkeys((str(space.user), os.path.realpath(space.user))))
        self._rules: dict[Kind, tuple[tuple[str, Rules], ...]] = {
            kind: tuple((grant.name, self._placed(grant.rules(kind))) for grant in rights.grants)
            for kind in ("read", "write")
        }

    def given(self, kind: Kind, text: str) -> str:
        """Return the path of what is needed, if it may be given."""
        path = self._path(text)
        self._refuse_own(path, text)
        self._refuse_denied(kind, path)
        return path

    def verdicts(self, kind: Kind, text: str) -> tuple[Verdict, ...]:
        """Return what each grant says of a path."""
        path = self._path(text)
        self._refuse_own(path, text)
        return tuple(
            Allow(name, ruling(rules, kind, path)[1])
            if (refused := rules.match(path, kind)) is None
            else Deny(_denied(kind, path, refused, name).message, refused, name)
            for name, rules in self._rules[kind]
        )

    def inside(self, kind: Kind, folder: str) -> Iterator[str]:
        """Yield what lies below a folder that is given and must not be: by a rule, or because it holds secrets."""
        denied = [rule for _, rules in self._rules[kind] for rule in rules.deny]
        if kind == "read":
            bases = [folder, self._project, f"{self._project}/.ai"]
            denied += [rule for base in bases for name in _SECRET_NAMES for rule in anchored(name, base)]
            yield from (own for own in self._own if Path(own).is_relative_to(folder) and os.path.lexists(own))
        try:
            for path, _ in below(folder, dict.fromkeys(denied), _MOST_ENTRIES):
                # What a link leads to is what it keeps; the link itself shows nothing that is not given.
                real = os.path.realpath(path)
                if Path(real).is_relative_to(folder) and os.path.lexists(real):
                    yield real
        except TooMany:
            raise PolicyDenied(
                f"{folder!r} holds more than {_MOST_ENTRIES:,} files, too many to find those that a rule denies.",
                suggestion="Let the item need a smaller folder, or deny folders by their names, without `**`.",
            ) from None

    def _path(self, text: str) -> str:
        plain = text.removesuffix("/**").removesuffix("/") or "/"
        if plain in {"**", "."}:
            return self._project
        path = os.path.normpath(placed(plain, self._project))
        if not is_pattern(plain):
            raise PolicyDenied(f"{text!r} names no files that could be given.", suggestion="Write it without `..`.")
        if (real := os.path.realpath(path)) != path:
            raise PolicyDenied(
                f"{text!r} leads through a link to {real!r}, and links are not followed.",
                suggestion="Name in `needs` what the link leads to.",
            )
        return path

    def _refuse_own(self, path: str, text: str) -> None:
        if any(Path(path).is_relative_to(own) for own in self._own):
            raise PolicyDenied(
                f"{text!r} is in Kiwi's own folder, which nothing is given.",
                suggestion="Let the item need a folder of the project, or of your home.",
            )
        if any(fits_path(name, Path(path).name) for name in _SECRET_NAMES):
            raise PolicyDenied(
                f"{text!r} holds secrets, which are given by name and not by file.",
                suggestion="Declare the variables: `variables: [NAME]` under `config`, or `${NAME}`.",
            )

    def _refuse_denied(self, kind: Kind, path: str) -> None:
        for name, rules in self._rules[kind]:
            refused = rules.match(path, kind)
            if refused is not None:
                raise _denied(kind, path, refused, name)
        # What is written is seen as well, without a rule that says so; one that denies it still counts.
        for name, rules in self._rules["read"] if kind == "write" else ():
            if refused := rules.match(path, "read"):
                raise _denied("read", path, refused, name)

    def _placed(self, rules: Rules) -> Rules:
        return Rules(*(tuple(self._all(patterns)) for patterns in (rules.allow, rules.deny)))

    def _all(self, patterns: Iterable[str]) -> Iterator[str]:
        for pattern in patterns:
            yield from anchored(pattern, self._project)


def _refuse_absent(wanted: Mapping[str, str], writable: Iterable[str]) -> None:
    """Refuse a path that is to be written and is not there, unless it would lie in a folder that is."""
    for path, text in wanted.items():
        if not any(Path(path).is_relative_to(folder) for folder in writable):
            raise Unavailable(
                f"{text!r}, which the item needs to write, is not there.",
                suggestion=f"Create it (`mkdir -p {path}`), or let the item need the folder that it would lie in.",
                path=path,
            )


def _demand(rights: Rights, kind: Kind, resource: str) -> None:
    match rights.verdict(kind, resource):
        case Deny(reason=reason, rule=rule, grant=grant):
            raise PolicyDenied(f"It needs what it may not have: {reason}.", suggestion=_FIX, rule=rule, grant=grant)


def _demand_public(rights: Rights, host: str) -> None:
    """Refuse an address that is not public and that the owner did not name; what names lead to is seen later."""
    name, _, port = host.strip("[").replace("]", "").rpartition(":") if _has_port(host) else (host, "", "")
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


def _has_port(host: str) -> bool:
    return host.count(":") == 1 or "]:" in host


def _denied(kind: Kind, path: str, rule: str, grant: str) -> PolicyDenied:
    why = f"the rule {rule!r} of {grant} denies it" if rule else f"no rule of {grant} allows it"
    wanted = f"files.{kind}.allow"
    return PolicyDenied(
        f"It needs to {kind} {path!r}, and {why}.",
        suggestion=_FIX if rule else f"If the owner means it, add {path!r} to `{wanted}`. {_FIX}",
        rule=rule,
        grant=grant,
    )
