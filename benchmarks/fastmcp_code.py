"""FastMCP before the servers of a file, over stdio: every tool, or with `code` its code mode; runs where FastMCP is."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from fastmcp import Client  # type: ignore[import-not-found] # it is in an environment of its own
from fastmcp.experimental.transforms.code_mode import CodeMode  # type: ignore[import-not-found] # as above
from fastmcp.server import create_proxy  # type: ignore[import-not-found] # as above


async def serve(config: object, *, is_code: bool) -> None:
    """Serve until the input ends."""
    logging.disable(logging.WARNING)
    async with Client(config) as client:
        server = create_proxy(client)
        if is_code:
            server.add_transform(CodeMode())
        await server.run_async(transport="stdio", show_banner=False)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), is_code=sys.argv[2:] == ["code"]))
