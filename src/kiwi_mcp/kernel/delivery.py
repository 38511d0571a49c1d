"""Delivery: the values that a call is given, from their places or from the store of secrets, where they may go."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.isolation import Provenance
from kiwi_mcp.kernel.confining import Judge
from kiwi_mcp.policy.floors import unproven
from kiwi_mcp.primitives.bounds import Holder, Stored, refuse_holder
from kiwi_mcp.primitives.secrets import Found, Revealed, Secret, Variables

STORE = "the store of secrets"
"""Where `why` says that a stored secret comes from."""
_FOLDER = "secrets"
_PROCESS = "subprocess"
_DOUBTFUL: frozenset[Provenance] = frozenset({"model_written", "unknown"})
"""Whose changes of an item take its secrets away until the owner grants them anew."""


class Values(Protocol):
    """The store of secrets, as far as calls look into it."""

    def all(self) -> Mapping[str, Stored]:
        """Return every secret by its name."""

    def value(self, stored: Stored) -> Secret:
        """Return the value of a secret."""


def vault_folder(user: Path) -> Path:
    """Return the folder of the store of secrets."""
    return user / "state" / _FOLDER


_vaults: dict[Path, Values] = {}


def vault_of(user: Path) -> Values | None:
    """Return the store of secrets of a user; None where there is none, which costs nothing to find out."""
    folder = vault_folder(user)
    if not os.path.isdir(folder):  # noqa: PTH112 - quicker, on the way of every call with variables
        return None
    if folder not in _vaults:
        # Only who has a store waits for what opens it.
        key = import_module("kiwi_mcp.primitives.vault_key").vault_key(folder.parent)
        _vaults[folder] = import_module("kiwi_mcp.primitives.vault").Vault(folder, key)
    return _vaults[folder]


def holder_of(chain: Chain, space: Space, judge: Judge = unproven) -> Holder:
    """Return who is given the secrets of a chain: its item, or the server that answers for it, which declares them."""
    receiver = chain.executor if chain.driver == "mcp" else chain.tool
    return Holder(
        receiver.identity.partition("@")[0],
        str(space.project),
        chain.primitive.id == _PROCESS,
        receiver.digest,
        judge(Chain((receiver,), "")).decisive.provenance not in _DOUBTFUL,
    )


def held(names: Collection[str], user: Path) -> Mapping[str, Stored]:
    """Return those of some names that the store holds."""
    vault = vault_of(user)
    known = vault.all() if vault else {}
    return {name: known[name] for name in names if name in known}


def every_value(space: Space) -> Mapping[str, str]:
    """Return all values that may be secret here, so that a text that is kept can be cleaned of them."""
    vault = vault_of(space.user)
    sealed = {name: Found(STORE, vault.value(one)) for name, one in vault.all().items()} if vault else {}
    return {**Variables().every(project=space.project, user=space.user), **Revealed(sealed)}


def delivered(
    needed: Collection[str],
    holder: Holder | None,
    space: Space,
    *,
    optional: Collection[str] = (),
    needed_by: str,
) -> Revealed:
    """Return the values of names; a name that is set nowhere, or not granted, is an error before anything runs.

    A name that the store holds comes from there alone. Without a holder it is the owner's own settings that name it.
    """
    stored = held((*needed, *optional), space.user)
    if holder is not None:
        for one in stored.values():
            refuse_holder(one, holder)
    found = Variables().resolve(
        [name for name in needed if name not in stored],
        optional=[name for name in optional if name not in stored],
        project=space.project,
        user=space.user,
        needed_by=needed_by,
    )
    vault = vault_of(space.user)
    if vault is None or not stored:
        return Revealed(found)
    sealed = {name: Found(STORE, vault.value(one)) for name, one in stored.items()}
    return Revealed({**found, **sealed}, {name: one.bound for name, one in stored.items()})
