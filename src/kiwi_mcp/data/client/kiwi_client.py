"""Calls items from inside a Python tool, which names them under `needs: {items: [...]}` of its manifest.

    import os, sys
    sys.path.append(os.environ["KIWI_CLIENT"])
    from kiwi_client import call

    price = call("price_of", article="tea")
"""

import json
import os
from threading import Lock

_lock = Lock()


class ItemCallFailed(Exception):
    """A call that was refused or failed; `code` says why."""

    def __init__(self, code, message):
        super().__init__(f"{code}: {message}")
        self.code = code


def call(item, /, **parameters):
    """Call an item and return its result."""
    calls = int(os.environ["KIWI_CALLS"])
    with _lock:
        data = json.dumps({"item": item, "parameters": parameters}).encode() + b"\n"
        while data:
            data = data[os.write(calls, data) :]
        line = bytearray()
        while not line.endswith(b"\n"):
            if not (more := os.read(calls, 1 if not line else 65536)):
                raise ItemCallFailed("unavailable", "there was no answer")
            line += more
    answer = json.loads(line)
    if "error" in answer:
        raise ItemCallFailed(answer["error"], answer["message"])
    return answer["result"]
