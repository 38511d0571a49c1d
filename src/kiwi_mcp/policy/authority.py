"""The authority: who somebody is, what they may do, and by which rules. Everything else asks it, and knows no rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, TokenRefused
from kiwi_mcp.domain.grants import Kind, Rights, Verdict, narrow
from kiwi_mcp.domain.identity import OWNER, Identity
from kiwi_mcp.policy.deployment import deployed
from kiwi_mcp.policy.owner import owner_policy


class Authority(Protocol):
    """Decides about every use. What it raises is a refusal."""

    def authenticate(self, token: str) -> Identity:
        """Return who shows a token; refuse one that is nobody's."""

    def authorize(self, identity: Identity, resource: str, action: Kind) -> Verdict:
        """Return whether somebody may use something: run an item, read a path, call a host, ask for a verb."""

    def manage(self, identity: Identity) -> Rights:
        """Return the rules that hold for somebody now, which all that they cause is held to."""


def nobody(_: str) -> Identity:
    """Refuse a token: none are known here."""
    raise TokenRefused("No token is valid here.", suggestion="Call without one, as the owner.")


class OwnerAuthority:
    """The rules of the owner's policy.yaml and of the deployments of this machine; `known` tells whose a token is."""

    def __init__(self, user: Path, known: Callable[[str], Identity] = nobody) -> None:
        self._user = user
        self._known = known

    def authenticate(self, token: str) -> Identity:
        """Return who shows a token."""
        return self._known(token)

    def authorize(self, identity: Identity, resource: str, action: Kind) -> Verdict:
        """Return what the rules say."""
        return self.manage(identity).verdict(action, resource)

    def manage(self, identity: Identity) -> Rights:
        """Return the owner's rules for everybody, those of this machine, and those for whoever it is."""
        return rights_of(self._user, identity)


def rights_of(user: Path, identity: Identity = OWNER) -> Rights:
    """Return what somebody may use by the files of the owner and of this machine."""
    policy = owner_policy(user)
    rights = deployed(Rights((policy.grant,)))
    actor = policy.actors.get(identity.name) if identity.name else None
    return narrow(rights, actor) if actor else rights


def ask(authority: Authority, identity: Identity) -> Rights:
    """Return the rules of an authority; one that fails in any way allows nothing."""
    try:
        return authority.manage(identity)
    except KiwiError:
        raise
    except Exception as fault:
        raise _failed(fault) from fault


def identify(authority: Authority, token: str) -> Identity:
    """Return who shows a token; an authority that fails in any way knows nobody."""
    try:
        return authority.authenticate(token)
    except KiwiError:
        raise
    except Exception as fault:
        raise _failed(fault) from fault


def judge(authority: Authority, identity: Identity, resource: str, action: Kind) -> Verdict:
    """Return the verdict of an authority; one that fails in any way allows nothing."""
    try:
        return authority.authorize(identity, resource, action)
    except KiwiError:
        raise
    except Exception as fault:
        raise _failed(fault) from fault


def _failed(fault: Exception) -> PolicyDenied:
    return PolicyDenied(
        f"Whether this is permitted cannot be found out ({type(fault).__name__}), so it is not.",
        suggestion="Mend the authority that the kernel was given.",
    )
