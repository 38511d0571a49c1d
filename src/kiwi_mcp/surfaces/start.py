"""The one entry of every command, which imports next to nothing: an MCP client waits for its first answer.

`kiwi serve` is answered by stage one alone until the client has its list of tools; only then are the official SDK
and the kernel imported, while the client thinks. Everything else goes to the CLI.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from kiwi_mcp import __version__


def main() -> None:
    """Run the command that the arguments name."""
    words = sys.argv[1:]
    if words in (["version"], ["--version"]):
        sys.stdout.write(f"{__version__}\n")
        sys.exit()
    if words[:1] == ["serve"] and (project := named_project(words[1:])) is not None:
        serve(project)
    else:
        import_module("kiwi_mcp.surfaces.cli.app").main()


def named_project(words: Sequence[str]) -> str | None:
    """Return the project `serve` was given, empty without one; None for words that the CLI has to explain."""
    match words:
        case []:
            return ""
        case ["--project", path] if path and not path.startswith("-"):
            return path
        case [word] if word.startswith("--project="):
            return word.removeprefix("--project=") or None
        case _:
            return None


def serve(project: str) -> None:
    """Serve MCP on standard input and output, in two stages, until the client leaves."""
    stdio = import_module("kiwi_mcp.surfaces.mcp.stdio")
    greeting = import_module("kiwi_mcp.surfaces.mcp.greeting")
    wire = stdio.claim()
    prepared = greeting.load_prepared()
    opening = greeting.greet(wire, greeting.Greeting(prepared, greeting.load_tools(prepared, project)))
    if not opening.lines.is_ended:
        import_module("kiwi_mcp.surfaces.mcp.serving").run(wire, opening, project)
