"""The anchor: where the chain of receipts ended, kept apart from the store, so that a cut end is noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.domain.errors import KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.receipt import Head
from kiwi_mcp.kernel.private_file import changing
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.manifest.digest import canonical
from kiwi_mcp.primitives.mac import Mac
from kiwi_mcp.store.receipts import Receipts

FILE, KEY = "state/audit.head", "state/audit.key"
_PERIOD = 5.0
"""For how many seconds a receipt may be without its place in the anchor; its place in the store it has at once."""
_LARGEST = 1_000_000


class Anchor:
    """The file that remembers the ends of chains: written in the background, and when the kernel ends."""

    def __init__(self, user: Path, store: Store) -> None:
        self._path = user / FILE
        self._mac = Mac(user / KEY)
        self._store = store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._saving: asyncio.Task[None] | None = None

    def note(self) -> None:
        """Note that a receipt was added: its place is kept within seconds."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(_PERIOD, self._begin)

    def _begin(self) -> None:
        if self._loop is not None:
            self._saving = self._loop.create_task(asyncio.to_thread(self._save))
            self._loop = None

    async def aclose(self) -> None:
        """Keep the place of what was added since."""
        if self._saving is not None and self._saving.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({self._saving})
        if self._loop is not None:
            self._loop = self._saving = None
            await asyncio.to_thread(self._save)

    def _save(self) -> None:
        # The receipts are in the store; what cannot be kept here now is kept the next time, or told by `verify`.
        with suppress(KiwiError):
            receipts = self._store.receipts()
            with changing(self._path) as write:
                heads, head = self._read(), receipts.settled_head()
                # A chain that is not the one that was kept is not kept in its place: `verify` has to find it.
                if receipts.holds(heads.get(receipts.url, Head())):
                    write(self._written({**heads, receipts.url: head}))

    def issues(self, receipts: Receipts) -> tuple[Issue, ...]:
        """Return what the kept end of a chain says against it."""
        fix = f"Compare the store with a backup or an export. To begin anew from what is there, remove {self._path}."
        try:
            kept = self._read().get(receipts.url)
        except KiwiError as error:
            return (Issue("the end of the chain", error.message, fix),)
        if kept is None:
            reason = f"{self._path} does not know it, so receipts may have been cut off unseen"
            issue = Issue("the end of the chain", reason, "The next call that is made notes it.")
            return (issue,) if receipts.after(0, 1) else ()
        if receipts.holds(kept):
            return ()
        reason = f"receipt {kept.count} was its end and is gone, or is another one: the end was cut off or replaced"
        return (Issue("the end of the chain", reason, fix),)

    def _read(self) -> Mapping[str, Head]:
        """Return the end of the chain of each store, by its URL."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_LARGEST)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreUnavailable(
                f"{self._path} cannot be read: {error.strerror or error}.", suggestion="Make it readable."
            ) from error
        try:
            written = as_object(json.loads(data))
        except (ValueError, RecursionError):
            written = {}
        stores = as_object(written.get("stores"))
        if not self._mac.fits(canonical(stores), as_text(written.get("mac"))):
            raise StoreDamaged(
                f"{self._path} was changed by somebody else, or is damaged.",
                suggestion="Check the receipts against a backup, then remove the file.",
            )
        return {url: _head(as_object(one)) for url, one in stores.items()}

    def _written(self, heads: Mapping[str, Head]) -> bytes:
        stores: dict[str, Json] = {url: {"count": head.count, "hash": head.hash} for url, head in heads.items()}
        return json.dumps({"stores": stores, "mac": self._mac.of(canonical(stores))}, indent=1).encode()


def _head(written: JsonObject) -> Head:
    count = written.get("count")
    return Head(count if isinstance(count, int) else 0, as_text(written.get("hash")))
