"""The secret store: named values with their hosts, form and grants, encrypted at rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct, ValidationError, convert, field, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import NotFound, StoreDamaged, TooLarge
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.domain.times import moment
from kiwi_mcp.primitives.secrets.encrypted_records import EncryptedRecord, EncryptedRecords
from kiwi_mcp.primitives.secrets.grants import SecretGrant, StoredSecret
from kiwi_mcp.primitives.secrets.reveal import SecretForm, SecretScope

MOST_SECRETS = 500
MOST_GRANTS = 50
"""How many items or patterns one secret may be granted to."""
_LIST, _VALUE = "list", "value"


class _SecretRow(Struct):
    version: int
    hosts: tuple[str, ...]
    form: SecretForm
    grants: tuple[SecretGrant, ...]
    set_at: str = ""
    valued_at: str = ""
    is_weak: bool = False


class _SecretList(Struct):
    last: int = 0  # the last version number of any value
    secrets: dict[str, _SecretRow] = field(default_factory=dict)


class SecretStore:
    """The secrets of one user, in a folder; `key` gives the key that seals them."""

    def __init__(self, folder: Path, key: Callable[[], bytes]) -> None:
        self._remedy = (
            f"Give Kiwi the key that it was sealed with. If that is lost, remove {folder} and set the secrets again."
        )
        self._sealed = EncryptedRecords(folder, key, remedy=self._remedy)
        self._read: tuple[tuple[int, int] | None, Mapping[str, StoredSecret]] | None = None

    def all(self) -> Mapping[str, StoredSecret]:
        """Return every secret by its name, without values; read again only when the list changed."""
        mark = self._sealed.mark(_LIST)
        if self._read is None or self._read[0] != mark:
            self._read = mark, self._listed()[1]
        return self._read[1]

    def named(self, name: str) -> StoredSecret:
        """Return a secret, or refuse a name that the store does not hold."""
        return _known(self.all(), name)

    def value(self, stored: StoredSecret) -> Secret:
        """Return the value of a secret."""
        found = self._sealed.read(_record(stored))
        if found is None or (value := found.secrets.get(_VALUE)) is None:
            raise StoreDamaged(
                f"The value of {stored.name} is not in the store any more.",
                suggestion=f"Set it again: `kiwi secrets rotate {stored.name}`.",
            )
        return value

    async def put(self, name: str, value: Secret, bound: SecretScope | None, *, is_weak: bool = False) -> StoredSecret:
        """Set the value of a name, new or existing. Grants stay, and so do hosts and form without a `bound`."""
        async with self._changing() as (last, known):
            if len(known) >= MOST_SECRETS and name not in known:
                raise TooLarge("The store of secrets", size=len(known) + 1, limit=MOST_SECRETS, unit="secrets")
            before, now = known.get(name), moment()
            new = before or StoredSecret(name, last, bound or _known(known, name).bound, set_at=now)
            after = replace(new, version=last + 1, bound=bound or new.bound, valued_at=now, is_weak=is_weak)
            # The list names the new value once that is there, and the old one goes when nothing names it.
            self._sealed.write(_record(after), EncryptedRecord({}, {_VALUE: value}))
            self._write(after.version, {**known, name: after})
            if before:
                self._sealed.remove(_record(before))
        return after

    async def rebind(self, name: str, bound: SecretScope) -> StoredSecret:
        """Change the hosts and the form of a secret; its value and its grants stay."""
        return await self._change(name, lambda stored: replace(stored, bound=bound))

    async def grant(self, name: str, grant: SecretGrant) -> StoredSecret:
        """Let items be given a secret."""

        def granted(stored: StoredSecret) -> StoredSecret:
            others = [one for one in stored.grants if (one.item, one.project) != (grant.item, grant.project)]
            grants = (*others, grant)
            if len(grants) > MOST_GRANTS:
                raise TooLarge(f"What {name} is granted to", size=len(grants), limit=MOST_GRANTS, unit="grants")
            return replace(stored, grants=grants)

        return await self._change(name, granted)

    async def revoke(self, name: str, is_gone: Callable[[SecretGrant], bool]) -> StoredSecret:
        """Take grants of a secret back."""
        return await self._change(
            name, lambda stored: replace(stored, grants=tuple(one for one in stored.grants if not is_gone(one)))
        )

    async def remove(self, name: str) -> None:
        """Forget a secret and its value."""
        async with self._changing() as (last, known):
            gone = _known(known, name)
            self._write(last, {other: stored for other, stored in known.items() if other != name})
            self._sealed.remove(_record(gone))

    async def move_key(self, move: Callable[[], None]) -> None:
        """Move the key to another storage while the store is locked against other changes."""
        async with self._sealed.held(_LIST):
            await asyncio.to_thread(move)

    async def _change(self, name: str, change: Callable[[StoredSecret], StoredSecret]) -> StoredSecret:
        async with self._changing() as (last, known):
            after = change(_known(known, name))
            self._write(last, {**known, name: after})
        return after

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[tuple[int, Mapping[str, StoredSecret]]]:
        async with self._sealed.held(_LIST):
            yield self._listed()

    def _listed(self) -> tuple[int, Mapping[str, StoredSecret]]:
        """Return the last version number of any value, and the stored secrets."""
        found = self._sealed.read(_LIST)
        try:
            listed = convert(found.facts if found else {}, _SecretList)
        except ValidationError as error:
            raise StoreDamaged(f"The list of secrets cannot be read: {error}", suggestion=self._remedy) from error
        return listed.last, {
            name: StoredSecret(
                name, row.version, SecretScope(row.hosts, row.form), row.grants, row.set_at, row.valued_at, row.is_weak
            )
            for name, row in listed.secrets.items()
        }

    def _write(self, last: int, known: Mapping[str, StoredSecret]) -> None:
        rows: Json = {
            name: to_builtins(
                _SecretRow(
                    one.version, one.bound.hosts, one.bound.form, one.grants, one.set_at, one.valued_at, one.is_weak
                )
            )
            for name, one in sorted(known.items())
        }
        self._sealed.write(_LIST, EncryptedRecord({"last": last, "secrets": rows}, {}))


def _record(stored: StoredSecret) -> str:
    return f"secret {stored.name} {stored.version}"


def _known(known: Mapping[str, StoredSecret], name: str) -> StoredSecret:
    if name not in known:
        raise NotFound(
            f"The store holds no secret {name!r}.",
            suggestion=f"`kiwi secrets list` shows the names; `kiwi secrets set {name}` makes one.",
        )
    return known[name]
