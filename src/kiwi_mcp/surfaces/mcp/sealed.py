"""Sealed states: what a client carries from a question to its answer, and can neither read nor change."""

from __future__ import annotations

import json
from hashlib import sha256
from secrets import token_bytes
from time import monotonic

from mcp.server.request_state import AESGCMRequestStateCodec, InvalidRequestState

from kiwi_mcp.domain.json import JsonObject

_LONGEST = 4_096
"""The longest state that is looked at, in characters; ours are far shorter."""


def bind(principal: str, method: str, name: str, arguments: JsonObject) -> str:
    """Return the digest of what a state is good for: one principal's call of one name with the same arguments."""
    # As ASCII with sorted names: the same call gives the same text, whatever it holds.
    text = json.dumps([principal, method, name, arguments], sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


class Seal:
    """Seals tickets into states and opens them, by a key that no other process has."""

    def __init__(self) -> None:
        # What a ticket stands for is in this process's memory, so the key may go with the process.
        self._codec = AESGCMRequestStateCodec([token_bytes(32)])

    def close(self, ticket: str, binding: str, *, seconds: float) -> str:
        """Return a state that gives the ticket back to the same call, for so long."""
        return self._codec.seal(json.dumps([ticket, binding, monotonic() + seconds]).encode())

    def open(self, state: str, binding: str) -> str | None:
        """Return the ticket in a state; None where it is not ours, not this call's, or too old."""
        try:
            ticket, bound, until = json.loads(self._codec.unseal(state[:_LONGEST]))
        except InvalidRequestState:
            return None
        return str(ticket) if bound == binding and monotonic() < until else None
