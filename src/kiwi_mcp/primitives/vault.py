"""The store of secrets: their values, each sealed apart, and one sealed list of what holds each of them.

A value is sealed under its name and its version, and the list says which version counts, so neither the value of
another secret nor an older one of the same opens in its place. Whatever does not open is an error: a name that the
store may hold is never looked for elsewhere instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from kiwi_mcp.domain.errors import NotFound, StoreDamaged, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.times import moment
from kiwi_mcp.primitives.bounds import GrantedTo, Stored
from kiwi_mcp.primitives.sealed import Record, Sealed
from kiwi_mcp.primitives.secrets import FORMS, Bound, Secret

MOST_SECRETS = 500
MOST_GRANTS = 50
"""How many items or patterns one secret may be granted to."""
_LIST, _VALUE = "list", "value"


class Vault:
    """The secrets of one user, in a folder; `key` gives the key that seals them."""

    def __init__(self, folder: Path, key: Callable[[], bytes]) -> None:
        remedy = (
            "Give Kiwi the key or the passphrase that it was sealed with. If that is lost, remove "
            f"{folder} and set the secrets again."
        )
        self._sealed = Sealed(folder, key, remedy=remedy)
        self._read: tuple[tuple[int, int] | None, Mapping[str, Stored]] | None = None

    def all(self) -> Mapping[str, Stored]:
        """Return every secret by its name, without values; read again only when the list changed."""
        mark = self._sealed.mark(_LIST)
        if self._read is None or self._read[0] != mark:
            self._read = mark, self._listed()[1]
        return self._read[1]

    def named(self, name: str) -> Stored:
        """Return a secret, or refuse a name that the store does not hold."""
        return _known(self.all(), name)

    def value(self, stored: Stored) -> Secret:
        """Return the value of a secret."""
        found = self._sealed.read(_record(stored))
        if found is None or (value := found.secrets.get(_VALUE)) is None:
            raise StoreDamaged(
                f"The value of {stored.name} is not in the store any more.",
                suggestion=f"Set it again: `kiwi secrets rotate {stored.name}`.",
            )
        return value

    async def put(self, name: str, value: Secret, bound: Bound | None, *, is_weak: bool = False) -> Stored:
        """Give a name its value, the first or another one; grants stay, and so do hosts and form without a `bound`."""
        async with self._changing() as (last, known):
            if len(known) >= MOST_SECRETS and name not in known:
                raise TooLarge("The store of secrets", size=len(known) + 1, limit=MOST_SECRETS, unit="secrets")
            before, now = known.get(name), moment()
            new = before or Stored(name, last, bound or _known(known, name).bound, set_at=now)
            after = replace(new, version=last + 1, bound=bound or new.bound, valued_at=now, is_weak=is_weak)
            # The list names the new value once that is there, and the old one goes when nothing names it.
            self._sealed.write(_record(after), Record({}, {_VALUE: value}))
            self._write(after.version, {**known, name: after})
            if before:
                self._sealed.remove(_record(before))
        return after

    async def rebind(self, name: str, bound: Bound) -> Stored:
        """Change the hosts and the form of a secret; its value and its grants stay."""
        return await self._change(name, lambda stored: replace(stored, bound=bound))

    async def grant(self, name: str, grant: GrantedTo) -> Stored:
        """Let items be given a secret."""

        def granted(stored: Stored) -> Stored:
            others = [one for one in stored.grants if (one.item, one.project) != (grant.item, grant.project)]
            grants = (*others, grant)
            if len(grants) > MOST_GRANTS:
                raise TooLarge(f"What {name} is granted to", size=len(grants), limit=MOST_GRANTS, unit="grants")
            return replace(stored, grants=grants)

        return await self._change(name, granted)

    async def revoke(self, name: str, is_gone: Callable[[GrantedTo], bool]) -> Stored:
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
        """Have the key kept in another way, while nobody else changes the store."""
        async with self._sealed.held(_LIST):
            await asyncio.to_thread(move)

    async def _change(self, name: str, change: Callable[[Stored], Stored]) -> Stored:
        async with self._changing() as (last, known):
            after = change(_known(known, name))
            self._write(last, {**known, name: after})
        return after

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[tuple[int, Mapping[str, Stored]]]:
        async with self._sealed.held(_LIST):
            yield self._listed()

    def _listed(self) -> tuple[int, Mapping[str, Stored]]:
        """Return the last version that was given to any value, and what is stored."""
        found = self._sealed.read(_LIST)
        facts = found.facts if found else {}
        last = facts.get("last")
        rows = as_object(facts.get("secrets")).items()
        return last if isinstance(last, int) else 0, {name: _stored(name, as_object(row)) for name, row in rows}

    def _write(self, last: int, known: Mapping[str, Stored]) -> None:
        rows: Json = {name: _row(known[name]) for name in sorted(known)}
        self._sealed.write(_LIST, Record({"last": last, "secrets": rows}, {}))


def _record(stored: Stored) -> str:
    return f"secret {stored.name} {stored.version}"


def _known(known: Mapping[str, Stored], name: str) -> Stored:
    if name not in known:
        raise NotFound(
            f"The store holds no secret {name!r}.",
            suggestion=f"`kiwi secrets list` shows the names; `kiwi secrets set {name}` makes one.",
        )
    return known[name]


def _row(stored: Stored) -> JsonObject:
    return {
        "version": stored.version,
        "hosts": list(stored.bound.hosts),
        "form": stored.bound.form,
        "grants": [{"item": one.item, "project": one.project, "digest": one.digest} for one in stored.grants],
        "set_at": stored.set_at,
        "valued_at": stored.valued_at,
        "is_weak": stored.is_weak,
    }


def _stored(name: str, row: JsonObject) -> Stored:
    version, form = row.get("version"), row.get("form")
    grants = map(as_object, as_list(row.get("grants")))
    return Stored(
        name,
        version if isinstance(version, int) else 0,
        Bound(tuple(map(as_text, as_list(row.get("hosts")))), next((word for word in FORMS if word == form), "env")),
        tuple(GrantedTo(*(as_text(one.get(word)) for word in ("item", "project", "digest"))) for one in grants),
        as_text(row.get("set_at")),
        as_text(row.get("valued_at")),
        row.get("is_weak") is True,
    )
