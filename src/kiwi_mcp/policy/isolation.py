"""Isolation of a plan: its level and what decided it, its sandbox profile, and hashes of code that no digest covers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from time import monotonic
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import IsolationUnavailable, KiwiError
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.isolation import LEVELS, Level, Provenance, ResourceLimits, SandboxProfile, strictest
from kiwi_mcp.domain.items import UNIX, Chain, Needs, Tool
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.manifest.runtime import split_words, texts
from kiwi_mcp.manifest.signatures import canonical, sha256_hex
from kiwi_mcp.manifest.templates import placeholders
from kiwi_mcp.policy.needs import command_access, reach
from kiwi_mcp.primitives.process.spawn import search_path
from kiwi_mcp.sandbox.command_files import files_of_command, script_in
from kiwi_mcp.sandbox.levels import base_profile, floor

_COMMANDS = frozenset({"command", "run_command", "compile_command"})
"""The keys of a config that name programs."""
_CODE = lazy_pattern(r"\.(?:py[cz]?|[cm]?[jt]s|[jt]sx|rb|pl|php|(?:ba)?sh|lua|r|jar|dll|so|wasm)\Z", re.IGNORECASE)
"""How files end that are code, wherever they stand in a command."""
_STARTED = ("__main__.py", "index.js", "package.json")
"""What an interpreter that is given a folder begins with."""
_LARGEST = 512_000_000
_Stat: TypeAlias = tuple[int, int, int, int, int]
_File: TypeAlias = tuple[str, _Stat]
_OF_TOOLS = ResourceLimits()
_OF_SERVERS = ResourceLimits(memory_bytes=2_147_483_648, cpus=2.0, cpu_seconds=86_400, tmp_bytes=1_073_741_824)
"""A server answers many calls, for as long as it is used."""
_FRESH = 5.0
"""How long the profile of a server is reused, in seconds: computing it may mean searching folders."""
_GrantedProfile: TypeAlias = tuple[SandboxProfile, tuple[str, ...]]
"""A sandbox profile, and the warnings about it."""
_server_profiles: dict[tuple[object, ...], tuple[float, _GrantedProfile]] = {}
_PROFILES_KEPT = 256


def external_code(chain: Chain) -> tuple[tuple[str, str], ...]:
    """Return the files that the words of a chain name as code, each with a hash of what it holds."""
    found = dict.fromkeys(one for link in chain.links for one in _named(link, chain.project))
    return tuple((_real(*one), _mark(*one)) for one in found)


def names_code(chain: Chain) -> bool:
    """Whether a chain may name files as code that no digest covers."""
    return any(not link.origin.is_built_in and _COMMANDS & link.manifest.config.keys() for link in chain.links)


def known_as(link: Tool, chain: Chain) -> str:
    """Return the key that a link is remembered by: its digest, combined with the external code of its chain, if any."""
    beside = external_code(chain)
    return sha256_hex(canonical([link.digest, *map(list, beside)])) if beside else link.digest


def _named(link: Tool, project: Path | None) -> Iterator[_File]:
    """Yield the files that a link names as its program and its code; what ships with Kiwi names none."""
    config = link.manifest.config
    if link.origin.is_built_in or not _COMMANDS & config.keys():
        return
    folder = str(Path(project or "/", _filled(as_text(config.get("cwd")), project)))
    try:
        written = [split_words(config.get(name)) for name in ("run_command", "compile_command")]
    except KiwiError:  # such a chain is not run
        return
    for words in ((as_text(config.get("command")), *texts(config.get("args"))), *written):
        if not words or not words[0]:
            continue
        argv = [_filled(word, project) for word in words]
        program = argv[0]
        if "/" not in program:
            places = (f"{part}/{program}" for part in search_path().split(":"))
            program = next((place for place in places if os.access(place, os.X_OK)), "")
        if program and (found := _file(_placed(program, folder))) and not base_profile().covers(_real(*found)):
            yield found
        script = script_in(ProcessSpec(tuple(argv), folder))
        for number, word in enumerate(argv[1:], 1):
            named = word.partition("=")[2] if word.startswith("-") else word
            if not named or ("{" in named and placeholders(named)):
                continue
            place = _placed(named, folder)
            is_folder = (state := _state(place)) is not None and S_ISDIR(state.st_mode)
            inside = [f"{place}/{name}" for name in _STARTED] if is_folder else []
            yield from filter(None, map(_file, [place] if number == script or _CODE.search(place) else inside))


def _filled(word: str, project: Path | None) -> str:
    return word.replace("{project}", str(project)) if project else word


def _placed(named: str, folder: str) -> str:
    return named if named[0] == "/" else f"{folder}/{named}"


def _file(path: str) -> _File | None:
    """Return a file and the state that changes with its content; None if there is no file."""
    state = _state(path)
    if state is None or not S_ISREG(state.st_mode):
        return None
    return path, (state.st_ino, state.st_dev, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def _state(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - on the way of every call, where a Path costs more than the look
    except (OSError, ValueError):  # also a word too long for a name, or with a character that none has
        return None


@lru_cache(maxsize=1_024)
def _real(path: str, _: _Stat) -> str:
    return os.path.realpath(path)


@lru_cache(maxsize=1_024)
def _mark(path: str, stat: _Stat) -> str:
    """Return a hash of what a file holds, found out anew whenever the file was touched."""
    if stat[2] > _LARGEST:
        return repr(stat)
    try:
        with Path(path).open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        return f"unreadable: {fault.strerror}"


class LinkLevel(Struct, frozen=True):
    """The minimum isolation level of one link, and where the link comes from."""

    identity: str
    provenance: Provenance
    level: Level


class IsolationDecision(Struct, frozen=True):
    """The isolation level of a chain, and what decided it."""

    level: Level
    asked: Level
    """The strictest that its manifests ask for; `trusted` where none does."""
    floors: tuple[LinkLevel, ...]
    relaxed: Level | None = None
    """What the owner lets it run under, in place of its floors."""
    deployed: Level | None = None
    """The minimum level that the administrator of this machine sets for every process, if it is decisive."""
    is_looked_up: bool = True
    """Whether it could be found out where its links come from."""

    @property
    def decisive(self) -> LinkLevel:
        """The link with the strictest floor, the highest one where several have it."""
        return max(self.floors, key=lambda one: LEVELS.index(one.level))

    @property
    def provenance(self) -> Provenance:
        """The provenance that decides the isolation: that of the least trusted link, or the owner's decision."""
        if self.relaxed is not None:
            return "owner_pinned" if self.relaxed == "trusted" else "owner_relaxed"
        return self.decisive.provenance

    @property
    def is_asked(self) -> bool:
        """Whether its own manifests ask for more than its origin does."""
        least = self.relaxed or self.decisive.level
        return strictest([least, self.asked]) != least

    def to_json(self) -> JsonObject:
        """Return it as `why` shows it."""
        decided_by = "manifest" if self.is_asked else "owner" if self.relaxed else self.decisive.identity
        return {
            "level": self.level,
            "asked": self.asked,
            "provenance": self.provenance,
            "decided_by": "deployment" if self.deployed else decided_by,
            "floors": [
                {"identity": one.identity, "provenance": one.provenance, "floor": one.level} for one in self.floors
            ],
            **({"relaxed_to": self.relaxed} if self.relaxed else {}),
        }


def decide_isolation(chain: Chain, origins: Sequence[Provenance], relaxed: Level | None = None) -> IsolationDecision:
    """Return the isolation of a chain: the strictest of its links' minimum levels and of the levels they ask for.

    An owner's decision about exactly this chain replaces the minimum levels; the levels in its manifests still count.
    """
    floors = tuple(
        LinkLevel(link.identity, origin, floor(origin)) for link, origin in zip(chain.links, origins, strict=True)
    )
    least = [relaxed] if relaxed is not None else [one.level for one in floors]
    return IsolationDecision(strictest([*least, chain.isolation]), chain.isolation, floors, relaxed)


def raised(holding: IsolationDecision, least: Level | None) -> IsolationDecision:
    """Return the isolation of a chain with the minimum level that the administrator of this machine sets, if any."""
    if least is None or strictest([holding.level, least]) == holding.level:
        return holding
    return replace(holding, level=least, deployed=least)


def default_isolation(chain: Chain) -> IsolationDecision:
    """Return the isolation of a chain if only built-in items are trusted, and all others are unknown."""
    return decide_isolation(chain, ["builtin" if link.origin.is_built_in else "unknown" for link in chain.links])


def remedy(provenance: Provenance, identity: str) -> str:
    """Return what the owner can do if the isolation of an item is too strict for this machine or for its work."""
    if provenance != "unknown":
        return ""
    name = identity.partition("@")[0].rpartition("/")[2]
    if identity.startswith("registry/"):
        return f"{name} has no signature that you trust. Read it, then trust the key of its publisher."
    return f"The author of {name} is unknown. If it is yours, `kiwi sign {name}`."


def with_remedy(refused: IsolationUnavailable, provenance: Provenance, tool: Tool) -> IsolationUnavailable:
    """Return a refusal that says first what the owner can do about where the code comes from."""
    refused.suggestion = f"{remedy(provenance, tool.identity)} {refused.suggestion}".strip()
    return refused


def change_of(tool: Tool, holding: IsolationDecision) -> str:
    """Return what would change the isolation level of a tool; empty if nothing has to change."""
    if holding.deployed:
        return f"This machine holds every process by {holding.deployed} at least; no owner changes that."
    if holding.is_asked:
        return f"A manifest of its chain asks for {holding.asked}; it counts until its author takes the word out."
    if holding.relaxed:
        return f"The owner relaxed exactly this content; an edit ends that, and so does `kiwi relax {tool.id} --undo`."
    if response := remedy(holding.provenance, holding.decisive.identity):
        return response
    return "" if holding.level == LEVELS[0] else f"The owner can let it run less strictly: `kiwi relax {tool.id}`."


Judge: TypeAlias = Callable[[Chain], IsolationDecision]
"""Returns the isolation of a chain."""


def isolate(plan: Plan, chain: Chain, space: Space, judge: Judge, rights: Rights, *, is_meant: bool = False) -> Plan:
    """Return the plan with the sandbox profile of its process; `is_meant` says that its server was accepted."""
    if not isinstance(plan.spec, ProcessSpec):
        return plan
    if server := chain.server:
        profile, warnings = server_profile(server, plan.spec, space, judge, rights, is_meant=is_meant)
    else:
        profile, warnings = profile_of(chain, chain.needs, space, judge(chain), rights)
    # Code that runs and that no digest of an item covers is part of the plan, so that an approval covers it too.
    code = {"code": dict(beside)} if (beside := external_code(chain)) else {}
    return replace(plan, profile=profile, warnings=(*plan.warnings, *warnings), facts={**plan.facts, **code})


def server_profile(
    server: Chain, spec: ProcessSpec, space: Space, judge: Judge, rights: Rights, *, is_meant: bool
) -> _GrantedProfile:
    """Return the sandbox profile and the warnings of a server's process, computed again every few seconds."""
    grants = tuple((one.read, one.write, one.hosts, one.commands, one.is_public) for one in rights.grants)
    links = tuple((link.identity, link.digest) for link in server.links)
    decision = judge(server)
    start = (spec.argv, spec.cwd, spec.env.get("PATH"))
    key = (links, start, decision.level, decision.provenance, space, grants, is_meant)
    known = _server_profiles.get(key)
    if known is None or monotonic() > known[0]:
        if len(_server_profiles) >= _PROFILES_KEPT:
            _server_profiles.clear()
        profile, warnings = profile_of(server, server.needs, space, decision, rights)
        profile, more = seeing(profile, server.tool, spec, space, rights, is_meant=is_meant)
        known = _server_profiles[key] = (monotonic() + _FRESH, (profile, (*warnings, *more)))
    return known[1]


def seeing(
    profile: SandboxProfile, server: Tool, spec: ProcessSpec, space: Space, rights: Rights, *, is_meant: bool = False
) -> _GrantedProfile:
    """Return the profile of a server with the files that its command names. They are in the plan, which is approved."""
    if profile.level in {"trusted", "standard"}:  # it may read what its owner may read
        return profile, ()
    config = server.manifest.config
    has_folder, is_placed = bool(config.get("cwd")), "/" in as_text(config.get("command"))
    found = files_of_command(spec, has_folder=has_folder, is_placed=is_placed)
    is_owners = is_meant or server.origin.is_built_in or server.origin.is_in_user_space
    given = command_access(found.named, found.programs, profile, rights, space, is_owners=is_owners)
    readable, hidden = (*profile.readable, *given.readable), (*profile.hidden, *given.hidden)
    has_sockets = is_owners and UNIX in server.manifest.needs.sockets
    return replace(profile, readable=readable, hidden=hidden, has_sockets=has_sockets), given.warnings


def profile_of(
    chain: Chain, needs: Needs, space: Space, decision: IsolationDecision, rights: Rights
) -> _GrantedProfile:
    """Return the profile of a chain's process: its isolation level, and the access that it needs and may have."""
    limits = _OF_SERVERS if chain.server else _OF_TOOLS
    profile = SandboxProfile(decision.level, limits=limits, provenance=decision.provenance)
    given = asdict(reach(needs, rights, space))
    warnings = given.pop("warnings")
    return (profile, ()) if decision.level == "trusted" else (replace(profile, **given), warnings)
