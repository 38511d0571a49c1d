"""Authors of content by digest, and chains that the owner relaxed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from msgspec import Struct, convert
from msgspec.structs import astuple

from kiwi_mcp.domain.isolation import Level, Provenance
from kiwi_mcp.domain.times import moment
from kiwi_mcp.store.database import OwnedRows, insert_into, plain, within

_PATIENCE = 10.0  # for how many seconds a server may be silent: a call waits for it
_OF = "select digest, provenance from authors where holder = ? and digest in"
_LEVEL = "select '', level from relaxations where holder = ? and chain = ?"
_ADD = "insert into authors (holder, digest, provenance, actor, at) values (?, ?, ?, ?, ?) on conflict do nothing"
_FORGET = "delete from authors where holder = ? and digest = ?"
_TIGHTEN = "delete from relaxations where holder = ? and chain = ?"


class Relaxation(Struct, frozen=True):
    """An owner's decision that one exact chain may run at this level, regardless of its origin."""

    chain: str  # a hash of the identities, places and digests of all its links, and of what else they run
    identity: str
    digest: str
    level: Level
    reason: str
    actor: str
    at: str
    project: str = ""  # the only one that it is relaxed in; empty where no link of it is a project's


_COLUMNS = Relaxation.__struct_fields__
_RELAX = insert_into("relaxations", ("holder", *_COLUMNS))


class Authors(OwnedRows):
    """What one user of a store knows of who wrote what, and what they relaxed."""

    def stamp(self) -> int:
        """Return a number that differs from the last one whenever anything here may have changed."""
        return self.database.stamp()

    def look_up(self, digests: Sequence[str], chain: str) -> tuple[Mapping[str, Provenance], Level | None]:
        """Return where contents come from, those that are recorded, and the level that the owner gave a chain."""
        statement = f"{_OF} ({', '.join('?' * len(digests))}) union all {_LEVEL}"
        with within(_PATIENCE):
            rows = self.database.read(statement, (self.owner, *digests, self.owner, chain))
        known = {str(digest): str(word) for digest, word in rows}
        level = known.pop("", None)
        return cast("Mapping[str, Provenance]", known), cast("Level | None", level)

    def relaxations(self) -> Sequence[Relaxation]:
        """Return all that the owner relaxed, the latest first."""
        statement = f"select {', '.join(_COLUMNS)} from relaxations where holder = ? order by at desc, chain"  # noqa: S608 - our own names
        with within(_PATIENCE):
            rows = self.database.read(statement, (self.owner,))
        return tuple(convert(dict(zip(_COLUMNS, row, strict=True)), Relaxation) for row in rows)

    def record(self, digests: Iterable[str], provenance: Provenance, actor: str, *, replaces: bool) -> None:
        """Write down where contents come from; what was recorded before stays, unless this replaces it."""
        with within(_PATIENCE), self.database.transaction() as transaction:
            for digest in digests:
                if replaces:
                    transaction.write(_FORGET, (self.owner, digest))
                transaction.write(_ADD, plain((self.owner, digest, provenance, actor, moment())))

    def relax(self, relaxation: Relaxation) -> None:
        """Write down what the owner says of a chain, in place of what they said before."""
        with within(_PATIENCE), self.database.transaction() as transaction:
            transaction.write(_TIGHTEN, (self.owner, relaxation.chain))
            transaction.write(_RELAX, plain((self.owner, *astuple(relaxation))))

    def tighten(self, chains: Iterable[str]) -> None:
        """Remove the owner's decisions about chains."""
        with within(_PATIENCE), self.database.transaction() as transaction:
            for chain in chains:
                transaction.write(_TIGHTEN, (self.owner, chain))
