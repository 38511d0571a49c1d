"""Port `Authority`, rights of a principal, `ItemVisibility` (permitted, hidden)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from msgspec.structs import replace

from kiwi_mcp.domain.calls import OWNER, Principal
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, TokenRefused
from kiwi_mcp.domain.grants import ALL, ResourceKind, Rights, Verdict, empty_grant, narrow
from kiwi_mcp.manifest.home_config import home_config
from kiwi_mcp.policy.policy_files import deployed, owner_policy, rule_files
from kiwi_mcp.primitives.file_watch import watch

P = ParamSpec("P")
T = TypeVar("T")
_KEPT = 1_000
"""How many principals have their rights in memory."""


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
        if len(self._rights) >= _KEPT:
            self._rights.clear()
        self._rights[identity] = (generation, deployment, rights)
        return rights


_LOCKED = replace(empty_grant("`auth_mode: locked` of config.yaml"), verbs=ALL)
"""No item runs in anyone's name; what is not an item, such as a look at the audit log, is left to the other rules."""


def rights_of(user: Path, identity: Principal = OWNER) -> Rights:
    """Return what a principal may use according to the files of the owner and of this machine."""
    policy = owner_policy(user)
    rights = deployed(Rights((policy.grant,)))
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
