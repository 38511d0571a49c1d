"""The rights of a principal, from `policy.yaml` of the owner and `deployment.yaml` of the machine; port `Authority`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISLNK
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.calls import OWNER, Principal
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, PolicyDenied, TokenRefused
from kiwi_mcp.domain.grants import (
    ALL,
    OWNER_POLICY,
    Deny,
    Grant,
    ResourceKind,
    Rights,
    Rules,
    Verdict,
    empty_grant,
    narrow,
)
from kiwi_mcp.domain.isolation import LEVELS, Level, strictest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import CHECKPOINT_MODES
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.threads import DayLimits
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.home_config import FILE_NAME as CONFIG
from kiwi_mcp.manifest.home_config import home_config
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.policy.authorize import read_conditions
from kiwi_mcp.policy.needs import is_pattern, plain_path
from kiwi_mcp.primitives.file_watch import watch

NAMED = ("verbs", "items", "hosts", "commands", "variables", "spawn")
"""The keys with rules about names."""
WORDS = (*NAMED, "files", "conditions")
_FILE_WORDS = ("read", "write")
_FileState: TypeAlias = tuple[int, ...]
_RACY_NS = 50_000_000
SYSTEM_FOLDER = "/etc/kiwi"
_DEPLOYMENT_NAME = "deployment.yaml"
_DEPLOYMENT_KINDS = ("local", "managed")
_deployments: dict[Path, tuple[_FileState, Deployment]] = {}
FILE_NAME = OWNER_POLICY
_POLICY_KEYS = (*WORDS, "roots", "checkpoint", "actors", "spending")
_policies: dict[str, tuple[_FileState | None, Policy]] = {}
P = ParamSpec("P")
T = TypeVar("T")
_PRINCIPALS_KEPT = 1_000
"""How many principals have their rights in memory."""
_LOCKED = replace(empty_grant("`auth_mode: locked` of config.yaml"), verbs=ALL)
"""No item runs in anyone's name; what is not an item, such as a look at the audit log, is left to the other rules."""


def read_grant(written: JsonObject, name: str, place: str, issues: list[Issue], start: Grant) -> Grant:
    """Return a grant with the written rules; for every key that is not written, the rules of `start` apply."""
    named = {word: _rules(f"{place}{word}", written.get(word), issues, getattr(start, word)) for word in NAMED}
    files = written.get("files")
    issues += unknown_words(files, _FILE_WORDS, f"{place}files")
    for word in _FILE_WORDS:
        rules = _rules(f"{place}files.{word}", as_object(files).get(word), issues, getattr(start, word))
        for pattern in (*rules.allow, *rules.deny):
            if not is_pattern(pattern):
                fix = "Write a path below the project, below `~/`, or an absolute one, without `..`."
                issues.append(Issue(f"{place}files.{word}", f"{pattern!r:.80} names no files", fix))
        named[word] = Rules(tuple(map(plain_path, rules.allow)), tuple(map(plain_path, rules.deny)))
    conditions = read_conditions(written.get("conditions"), f"{place}conditions", issues)
    return replace(start, **named, conditions=conditions, name=name)


def unknown_words(written: Json, words: Collection[str], place: str) -> Iterator[Issue]:
    """Yield the faults of a mapping: it is not a mapping, or it has unknown keys."""
    listed = ", ".join(words)
    if written is not None and not isinstance(written, Mapping):
        yield Issue(place, "is not a mapping", f"Write words below it: {listed}.")
    for word in as_object(written):
        if word not in words:
            fix = f"{did_you_mean(word, words)}Use one of: {listed}."
            yield Issue(f"{place}.{word}".strip("."), "is not a known key", fix)


def texts(place: str, written: Json, issues: list[Issue]) -> tuple[str, ...]:
    """Return a list of texts; report any other value as an issue."""
    values = as_list(written)
    if (written is not None and not isinstance(written, list)) or not all(isinstance(v, str) for v in values):
        issues.append(Issue(place, "is not a list of words", 'Write it as `["first", "second"]`.'))
    return tuple(value for value in values if isinstance(value, str))


def _rules(place: str, written: Json, issues: list[Issue], start: Rules) -> Rules:
    issues += unknown_words(written, ("allow", "deny"), place)
    rules = as_object(written)
    # Rules that only deny restrict what is allowed by default.
    allow = texts(f"{place}.allow", rules["allow"], issues) if "allow" in rules else start.allow
    return Rules(allow, texts(f"{place}.deny", rules.get("deny"), issues))


def _state_of(found: os.stat_result) -> _FileState:
    """Return what tells two states of a file apart; nothing is equal to that of a file which was just written.

    The clock of a file system ticks every few milliseconds, so two writes within one tick look alike.
    """
    now = time.time_ns()
    young = now if now - found.st_ctime_ns < _RACY_NS else 0
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, young)


def rule_files(user: Path) -> Sequence[str]:
    """Return the files with the rules for a user: their policy, their config, and the deployments of this machine."""
    named = os.environ.get("KIWI_DEPLOYMENT")
    return (
        f"{user}/{FILE_NAME}",
        f"{user}/{CONFIG}",
        f"{SYSTEM_FOLDER}/{_DEPLOYMENT_NAME}",
        *([named] if named else []),
    )


class Deployment(Struct, frozen=True):
    """The rules of one file: which items are allowed, and the minimum isolation level of every process."""

    grant: Grant
    floor: Level | None = None
    is_managed: bool = False


def deployments() -> tuple[Deployment, ...]:
    """Return the deployments that hold on this machine; all of them do, so that a file more only takes away."""
    # On most machines there is not even the folder, and that is quickly seen on the way of every call.
    files = [Path(SYSTEM_FOLDER, _DEPLOYMENT_NAME)] if os.access(SYSTEM_FOLDER, os.F_OK) else []
    if named := os.environ.get("KIWI_DEPLOYMENT"):
        files.append(Path(named))
    return tuple(one for path in files if (one := _at(path)) is not None and one.is_managed)


def minimum() -> Level | None:
    """Return the minimum isolation level of every process on this machine; None if no file sets one."""
    levels = [one.floor for one in deployments() if one.floor is not None]
    return strictest(levels) if levels else None


def refuse_unlisted(identity: str) -> None:
    """Refuse to bring an item here that a deployment does not list: `SOURCE/NAMESPACE/NAME@VERSION`."""
    for one in deployments():
        match one.grant.verdict("item", identity):
            case Deny(reason=reason, rule=rule):
                raise PolicyDenied(
                    f"This is a managed deployment, and {reason}.",
                    suggestion="Ask the administrator of this machine to add it to the list.",
                    rule=rule,
                    grant=one.grant.name,
                )


def _at(path: Path) -> Deployment | None:
    try:
        state = _state_of(path.stat())
        known = _deployments.get(path)
        if known is None or known[0] != state:
            known = _deployments[path] = state, _parse_deployment(path)
    except FileNotFoundError:
        if path == Path(SYSTEM_FOLDER, _DEPLOYMENT_NAME) and not path.is_symlink():
            return None
        raise _unreadable_deployment(path, "it is not there") from None  # the file is expected to contain rules
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable_deployment(path, str(error)) from error
    return known[1]


def _parse_deployment(path: Path) -> Deployment:
    value = read_yaml(path.read_text(encoding="utf-8"), what=path.name).value
    written = as_object(value)
    issues = [*unknown_words(value, ("deployment", "items", "floor"), "")]
    kind, floor = written.get("deployment"), written.get("floor")
    if kind not in _DEPLOYMENT_KINDS:
        issues.append(Issue("deployment", "does not say which", f"Write one of: {', '.join(_DEPLOYMENT_KINDS)}."))
    if floor is not None and floor not in LEVELS:
        issues.append(Issue("floor", "is not a level of isolation", f"Write one of: {', '.join(LEVELS)}."))
    grant = read_grant(written, f"the deployment ({path.name})", "", issues, Grant(is_whole=True))
    if issues:
        raise InvalidManifest(f"The deployment {path}", issues)
    level = next((level for level in LEVELS if level == as_text(floor)), None)
    return Deployment(grant, level, is_managed=kind == "managed")


def _unreadable_deployment(path: Path, reason: str) -> InvalidManifest:
    is_named = path != Path(SYSTEM_FOLDER, _DEPLOYMENT_NAME)
    fix = "Fix it, or unset KIWI_DEPLOYMENT." if is_named else "Ask the administrator of this machine to fix it."
    issue = Issue("", f"cannot be read: {reason}", fix)
    return InvalidManifest(f"The deployment {path}", [issue])


class Policy(Struct, frozen=True):
    """What the owner allows all callers and each one, and the folders of other users that may be projects."""

    grant: Grant = field(default_factory=Grant)
    roots: tuple[Path, ...] = ()
    checkpoint: str = ""
    """When runs that change files get a checkpoint, overriding their items: `auto`, `explicit` or `disabled`."""
    actors: Mapping[str, Grant] = field(default_factory=dict)
    """Further rules for the callers with these names."""
    day_limits: DayLimits = DayLimits()
    """What threads may spend in a day."""


def owner_policy(user: Path) -> Policy:
    """Return the policy of a user space; read again only when the file changed."""
    path = f"{user}/{FILE_NAME}"
    stat = _stat(path)
    known = _policies.get(path)
    if known is None or known[0] != stat:
        known = _policies[path] = (stat, _parse_policy(Path(path)) if stat else Policy())
    return known[1]


def _stat(path: str) -> _FileState | None:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None  # where there is no space, there is no policy in it
    except OSError as error:
        raise _unreadable(error) from error
    try:  # a broken link may be the owner's policy on a disk that is not mounted
        return _state_of(os.stat(path) if S_ISLNK(found.st_mode) else found)  # noqa: PTH116 - on the way of every call
    except OSError as error:
        raise _unreadable(error) from error


def _parse_policy(path: Path) -> Policy:
    try:
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(error) from error
    written = as_object(value)
    issues = [*unknown_words(value, _POLICY_KEYS, "")]
    grant = read_grant(written, FILE_NAME, "", issues, Grant())
    folders = tuple(Path(text).expanduser() for text in texts("roots", written.get("roots"), issues))
    listed = written.get("actors")
    if listed is not None and not isinstance(listed, Mapping):
        issues.append(Issue("actors", "is not a mapping", "Write the name of a token, and its rules below it."))
    actors = {name: _actor(name, rules, issues) for name, rules in as_object(listed).items()}
    checkpoint = written.get("checkpoint", "")
    if checkpoint and checkpoint not in CHECKPOINT_MODES:
        issues.append(Issue("checkpoint", "is not a mode", f"Use one of: {', '.join(CHECKPOINT_MODES)}."))
    day_limits = _spending(written.get("spending"), issues)
    # A rule that is misspelt is a rule the owner believes in: refuse, never ignore.
    if issues:
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues)
    return Policy(grant, folders, as_text(checkpoint), actors, day_limits)


def _spending(written: Json, issues: list[Issue]) -> DayLimits:
    """Return what may be spent in a day: by all threads of the owner, and by each that others started; in dollars."""
    issues += unknown_words(written, ("per_day", "per_starter"), "spending")
    given = as_object(written)
    for name, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
            issues.append(Issue(f"spending.{name}", "is not an amount", "Write US dollars, such as `5` or `0.50`."))
            return DayLimits()
    amounts = {name: round(float(str(value)) * 1_000_000) for name, value in given.items()}
    known = DayLimits()
    return DayLimits(starter=amounts.get("per_starter", known.starter), owner=amounts.get("per_day", known.owner))


def _actor(name: str, written: Json, issues: list[Issue]) -> Grant:
    place = f"actors.{name}"
    issues += unknown_words(written, WORDS, place)
    rules = as_object(written)
    grant = read_grant(rules, f"{FILE_NAME} for {name}", f"{place}.", issues, Grant())
    files = as_object(rules.get("files"))
    read, write = (  # without an `allow` list, they add no limit to the rules of the owner
        found if "allow" in as_object(files.get(word)) else replace(found, allow=(*found.allow, "/**"))
        for word, found in (("read", grant.read), ("write", grant.write))
    )
    # This narrows the rules for all callers: only listed hosts remain, and items that an allow list does not name are
    # hidden from this actor.
    is_public = "allow" not in as_object(rules.get("hosts"))
    is_secretive = "allow" in as_object(rules.get("items"))
    return replace(grant, is_public=is_public, is_secretive=is_secretive, read=read, write=write)


def _unreadable(error: Exception) -> InvalidManifest:
    issue = Issue("", f"cannot be read: {error}", "Make it a text file that you can read.")
    return InvalidManifest(f"The owner's {FILE_NAME}", [issue])


class Authority(Protocol):
    """Decides about every use. What it raises is a refusal."""

    def authenticate(self, token: str) -> Principal:
        """Return the principal of a token; refuse an unknown token."""

    def authorize(self, identity: Principal, resource: str, action: ResourceKind) -> Verdict:
        """Return whether a principal may use a resource: run an item, read a path, call a host, ask for a verb."""

    def manage(self, identity: Principal) -> Rights:
        """Return the rules that apply to a principal now, and to everything that it causes."""


def no_answers(_: str) -> Principal:
    """Refuse a token: none are known here."""
    raise TokenRefused("No token is valid here.", suggestion="Call without one, as the owner.")


class OwnerAuthority:
    """The rules of policy.yaml and of the deployments of this machine; `known` maps a token to a principal."""

    def __init__(self, user: Path, known: Callable[[str], Principal] = no_answers) -> None:
        self._user = user
        self._known = known
        self._rights: dict[Principal, tuple[int, str | None, Rights]] = {}

    def authenticate(self, token: str) -> Principal:
        """Return who shows a token."""
        return self._known(token)

    def authorize(self, identity: Principal, resource: str, action: ResourceKind) -> Verdict:
        """Return the verdict of the rules."""
        return self.manage(identity).verdict(action, resource)

    def manage(self, identity: Principal) -> Rights:
        """Return the owner's rules for all principals, those of this machine, and those for this principal."""
        generation, deployment = watch.generation(), os.environ.get("KIWI_DEPLOYMENT")
        known = self._rights.get(identity)
        if known is not None and known[0] == generation and known[1] == deployment:
            return known[2]
        generation = watch.watch(rule_files(self._user))  # then the files are read
        rights = rights_of(self._user, identity)
        if len(self._rights) >= _PRINCIPALS_KEPT:
            self._rights.clear()
        self._rights[identity] = (generation, deployment, rights)
        return rights


def rights_of(user: Path, identity: Principal = OWNER) -> Rights:
    """Return what a principal may use according to the files of the owner and of this machine."""
    policy = owner_policy(user)
    rights = Rights((policy.grant, *(one.grant for one in deployments())))
    actor = policy.actors.get(identity.name) if identity.name else None
    rights = narrow(rights, actor) if actor else rights
    return narrow(rights, _LOCKED) if home_config(user).auth_mode == "locked" else rights


def ask(question: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a method of an authority answers; if it fails in any way, the use is refused."""
    try:
        return question(*args, **kwargs)
    except KiwiError:
        raise
    except Exception as fault:
        raise PolicyDenied(
            f"Whether this is permitted cannot be found out ({type(fault).__name__}), so it is not.",
            suggestion="Fix the authority of the kernel.",
        ) from fault
