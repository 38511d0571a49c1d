"""Counts: how many processes there may be inside a sandbox that no group bounds, set while its first one waits.

Set earlier, all processes of the user would be counted; and a program that sets it inside would take its own time.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
from contextlib import ExitStack, suppress

from kiwi_mcp.domain.isolation import Gate

_TOLD = 4_096


def count_at(gate: Gate, most: int, keep: ExitStack, _: int) -> None:
    """Have the first process inside counted, and all that it starts, as soon as its launcher tells of it."""
    loop, said = asyncio.get_running_loop(), bytearray()

    def listen() -> None:
        said.extend(os.read(gate.told, _TOLD))
        if b"}" in said or len(said) >= _TOLD:
            loop.remove_reader(gate.told)
            # Where this fails, the process waits in vain and its time is up: it never runs without a count.
            resource.prlimit(json.loads(said)["child-pid"], resource.RLIMIT_NPROC, (most, most))
            gate.open()

    def stop_listening() -> None:
        with suppress(RuntimeError):  # the loop has been closed
            loop.remove_reader(gate.told)

    loop.add_reader(gate.told, listen)
    keep.callback(stop_listening)
