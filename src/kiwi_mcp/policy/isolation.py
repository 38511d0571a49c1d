"""`IsolationDecision`; the `SandboxProfile` of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.isolation import LEVELS, Level, Provenance, ResourceLimits, SandboxProfile, strictest
from kiwi_mcp.domain.items import Chain, Needs, Tool
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.plan import Plan, ProcessSpec
from kiwi_mcp.policy.external_code import external_code
from kiwi_mcp.policy.needs import reach, seen
from kiwi_mcp.sandbox.command_files import files_of_command
from kiwi_mcp.sandbox.levels import floor


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
_OF_TOOLS = ResourceLimits()
_OF_SERVERS = ResourceLimits(memory_bytes=2_147_483_648, cpus=2.0, cpu_seconds=86_400, tmp_bytes=1_073_741_824)
"""A server answers many calls, for as long as it is used."""
_FRESH = 5.0
"""How long the profile of a server is reused, in seconds: computing it may mean searching folders."""
_Held: TypeAlias = tuple[SandboxProfile, tuple[str, ...]]
"""A sandbox profile, and the warnings about it."""
_server_profiles: dict[tuple[object, ...], tuple[float, _Held]] = {}
_PROFILES_KEPT = 256


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
) -> _Held:
    """Return the sandbox profile and the warnings of a server's process, computed again every few seconds."""
    said = tuple((one.read, one.write, one.hosts, one.commands, one.is_public) for one in rights.grants)
    links, held = tuple((link.identity, link.digest) for link in server.links), judge(server)
    key = (links, spec.argv, spec.cwd, spec.env.get("PATH"), held.level, held.provenance, space, said, is_meant)
    known = _server_profiles.get(key)
    if known is None or monotonic() > known[0]:
        if len(_server_profiles) >= _PROFILES_KEPT:
            _server_profiles.clear()
        profile, warnings = profile_of(server, server.needs, space, held, rights)
        profile, more = seeing(profile, server.tool, spec, space, rights, is_meant=is_meant)
        known = _server_profiles[key] = (monotonic() + _FRESH, (profile, (*warnings, *more)))
    return known[1]


def seeing(
    profile: SandboxProfile, server: Tool, spec: ProcessSpec, space: Space, rights: Rights, *, is_meant: bool = False
) -> _Held:
    """Return the profile of a server with the files that its command names. They are in the plan, which is approved."""
    if profile.level in {"trusted", "standard"}:  # it may read what its owner may read
        return profile, ()
    config = server.manifest.config
    has_folder, is_placed = bool(config.get("cwd")), "/" in as_text(config.get("command"))
    found = files_of_command(spec, has_folder=has_folder, is_placed=is_placed)
    is_owners = is_meant or server.origin.is_built_in or server.origin.is_in_user_space
    given = seen(found.named, found.programs, profile, rights, space, is_owners=is_owners)
    readable, hidden = (*profile.readable, *given.readable), (*profile.hidden, *given.hidden)
    return replace(profile, readable=readable, hidden=hidden), given.warnings


def profile_of(chain: Chain, needs: Needs, space: Space, held: IsolationDecision, rights: Rights) -> _Held:
    """Return the profile of a chain's process: its isolation level, and the access that it needs and may have."""
    limits = _OF_SERVERS if chain.server else _OF_TOOLS
    profile = SandboxProfile(held.level, limits=limits, provenance=held.provenance)
    given = asdict(reach(needs, rights, space))
    warnings = given.pop("warnings")
    return (profile, ()) if held.level == "trusted" else (replace(profile, **given), warnings)
