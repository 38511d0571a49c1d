"""Delivery: the values that a call is given, from their places or from the store of secrets, where they may go."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.isolation import Provenance
from kiwi_mcp.domain.items import SUBPROCESS, Chain
from kiwi_mcp.policy.isolation import Judge, default_isolation
from kiwi_mcp.primitives.secrets.grants import SecretRecipient, StoredSecret, refuse_holder, refuse_untrusted
from kiwi_mcp.primitives.secrets.key_storage import vault_key
from kiwi_mcp.primitives.secrets.reveal import FoundVariable, Revealed, Variables
from kiwi_mcp.primitives.secrets.store import SecretStore

STORE = "the store of secrets"
"""Where `why` says that a stored secret comes from."""
_DOUBTFUL: frozenset[Provenance] = frozenset({"model_written", "unknown"})
"""Items of these origins get variables only through a grant, and a change of such an item ends its grants."""
_vaults: dict[Path, SecretStore] = {}


def vault_folder(user: Path) -> Path:
    """Return the folder of the store of secrets."""
    return user / "state" / "secrets"


def vault_of(user: Path) -> SecretStore | None:
    """Return the store of secrets of a user; None where there is none, which costs nothing to find out."""
    folder = vault_folder(user)
    if not os.path.isdir(folder):  # noqa: PTH112 - quicker, on the way of every call with variables
        return None
    if folder not in _vaults:
        _vaults[folder] = open_vault(user)
    return _vaults[folder]


def open_vault(user: Path) -> SecretStore:
    """Return the store of secrets of a user, which is made when something is first stored."""
    return SecretStore(vault_folder(user), vault_key(vault_folder(user).parent))


def holder_of(
    chain: Chain, space: Space, judge: Judge = default_isolation, *, is_accepted: bool | None = None
) -> SecretRecipient:
    """Return who gets the secrets of a chain: its item, or the server of the item, which declares them.

    `is_accepted` says whether the owner accepted a server as it is, which makes its manifest trusted; it is None for
    items without a server.
    """
    holding = judge(chain.server or chain)
    receiver = (chain.server or chain).tool
    untrusted = tuple(floor.identity.partition("@")[0] for floor in holding.floors if floor.provenance in _DOUBTFUL)
    if not holding.is_looked_up:
        how = "The store could not be read, so it is not known who wrote it: `kiwi doctor` says why; then try again."
    elif is_accepted is not None:
        name = receiver.id
        how = f"Look at the server: `kiwi mcp diff {name}`. If it is right, the owner types `kiwi mcp accept {name}`."
    elif any(identity.startswith("registry/") for identity in untrusted):
        how = "Read it, then trust the key of its publisher: `kiwi key trust NAMESPACE KEY`."
    else:
        signs = ", ".join(f"`kiwi sign {identity.rpartition('/')[2]}`" for identity in untrusted)
        how = f"If it is yours, read it and sign it: {signs}."
    return SecretRecipient(
        receiver.identity.partition("@")[0],
        str(space.project),
        chain.primitive.id == SUBPROCESS,
        receiver.digest,
        holding.floors[0].provenance not in _DOUBTFUL,
        () if is_accepted else untrusted,
        how,
    )


def stored_secrets(names: Collection[str], user: Path) -> Mapping[str, StoredSecret]:
    """Return those of some names that the store holds."""
    vault = vault_of(user)
    known = vault.all() if vault else {}
    return {name: known[name] for name in names if name in known}


def every_value(space: Space) -> Mapping[str, str]:
    """Return all values that may be secret here, so that a text that is kept can be cleaned of them."""
    vault = vault_of(space.user)
    sealed = {name: FoundVariable(STORE, vault.value(one)) for name, one in vault.all().items()} if vault else {}
    return {**Variables().every(project=space.project, user=space.user), **Revealed(sealed)}


def missing_names(names: Collection[str], space: Space) -> tuple[str, ...]:
    """Return those of some names that have no value, in the store or outside of it."""
    known = {*stored_secrets(names, space.user), *_set_names(names, space)}
    return tuple(name for name in names if name not in known)


def _set_names(names: Collection[str], space: Space) -> list[str]:
    """Return those of some names that are set outside of the store."""
    places = Variables().locate(names, project=space.project, user=space.user)
    return [name for name in names if places[name] is not None]


def secrets_for(
    needed: Collection[str],
    holder: SecretRecipient | None,
    space: Space,
    *,
    optional: Collection[str] = (),
    needed_by: str,
) -> Revealed:
    """Return the values of names; a name that is set nowhere, or not granted, is an error before anything runs.

    A name that the store holds comes from there alone; any other one is given to trusted chains alone. Without a
    holder it is the owner's own settings that name it.
    """
    stored = stored_secrets((*needed, *optional), space.user)
    if holder is not None:
        for one in stored.values():
            refuse_holder(one, holder)
    plain, spare = ([name for name in names if name not in stored] for names in (needed, optional))
    if holder is not None and holder.untrusted != ():
        refuse_untrusted(_set_names([*plain, *spare], space), holder)
    found = Variables().resolve(plain, optional=spare, project=space.project, user=space.user, needed_by=needed_by)
    vault = vault_of(space.user)
    if vault is None or not stored:
        return Revealed(found)
    sealed = {name: FoundVariable(STORE, vault.value(one)) for name, one in stored.items()}
    return Revealed({**found, **sealed}, {name: one.bound for name, one in stored.items()})
