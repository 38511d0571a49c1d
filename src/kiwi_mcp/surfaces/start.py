"""The entry point of every command. It imports next to nothing, because an MCP client waits for its first answer.

`kiwi serve` answers from stage one alone until the client has its list of tools; only then are the official SDK
and the kernel imported. Help pages come from `commands.json`; every other command loads the modules that it needs.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from _thread import RLock
from collections.abc import Sequence
from importlib import import_module

from kiwi_mcp import __version__

_LARGE = ("cli.app", "mcp.stdio_server", "mcp.memory_server")
"""The modules that import the kernel."""
_LATER = (
    "asyncio.sslproto", "difflib", "getpass", "glob", "inspect", "rfc8785", "ssl", "termios", "tomllib", "webbrowser",
)  # fmt: skip
"""Modules of others that most commands do not need: they are loaded when they are first used."""
_OWN_LATER = (
    "drivers.container", "drivers.environments.packages", "drivers.git_copy",
    "drivers.tool_calls", "kernel.checkpoints.checkpoint", "kernel.mcp_servers", "kernel.tool_list",
    "manifest.directive", "manifest.hooks", "manifest.legacy", "manifest.markdown", "manifest.mcp.launch_command",
    "manifest.permissions", "manifest.program", "manifest.python_source", "memory.files", "policy.secret_access",
    "policy.preferences", "primitives.egress_proxy", "primitives.process.stdio_process", "primitives.secrets.grants",
    "store.registry.publish",
)  # fmt: skip
"""The same of Kiwi. Code that a command of every day imports names them as modules: `git_copy.git_copies()`."""
_REMOVING = RLock()
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
else:
    ModuleType = type(sys)


def command() -> None:
    """Run the command as a process of its own, and end it without taking the interpreter apart.

    That would take a tenth of the time of a command. What modules registered for the end of the process is done: the
    function that was registered first is called last. Output that cannot be written is reported as usual.
    """
    codes: list[int] = []
    atexit.register(_leave, codes)
    gc.set_threshold(
        10_000, 10, 10
    )  # a collection for every 700 new objects would take a millisecond of a short command
    defer_modules()
    try:
        main()
        codes.append(0)
    except KeyboardInterrupt:
        # A second Ctrl-C while the process ends must not add a traceback.
        signals = import_module("signal")
        signals.signal(signals.SIGINT, signals.SIG_IGN)
        sys.stderr.write("Interrupted.\n")
        codes.append(INTERRUPTED)
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            codes.append(ended.code or 0)
        raise


def _leave(codes: Sequence[int]) -> None:
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0] & 0xFF)


INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""


def defer_modules() -> None:
    """Put stand-ins in the place of modules that most commands do not need."""
    for name in (*_LATER, *(f"kiwi_mcp.{own}" for own in _OWN_LATER)):
        sys.modules.setdefault(name, LateModule(name))


class LateModule(ModuleType):
    """Stands in for a module until something of it is used.

    A second thread that uses it meanwhile waits for the import system's lock, and gets the same module. Only the
    removal needs a lock of its own: a late one would remove the module itself, which would then be loaded twice.
    """

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        with _REMOVING:
            if sys.modules.get(self.__name__) is self:
                del sys.modules[self.__name__]
        module = import_module(self.__name__)
        if name == "__all__":  # `from module import *`
            return getattr(module, name, [one for one in vars(module) if not one.startswith("_")])
        return getattr(module, name)


def main() -> None:
    """Run the command that the arguments name."""
    words = sys.argv[1:]
    if not words and not load("cli.help").show_start():
        words = ["status"]
    if words in (["version"], ["--version"]):
        sys.stdout.write(f"{__version__}\n")
    elif words[:1] == ["serve"] and (project := named_project(words[1:])) is not None:
        serve(project)
    elif words[:1] == ["__complete"]:
        load("cli.completion").complete(words[1:])
    elif words and not load("cli.help").show(words):
        load("cli.app").main(words, load)


def load(name: str) -> ModuleType:
    """Return a module of a surface, imported when it is needed."""
    # What is imported stays until the end: searching it for garbage would take a sixth of a command's time.
    gc.disable()
    try:
        if name in _LARGE:
            _import_msgspec()
        return import_module(f"kiwi_mcp.surfaces.{name}")
    finally:
        gc.freeze()
        gc.enable()


def _import_msgspec() -> None:
    """Import msgspec without `typing_extensions`, which takes longer to import than all of msgspec."""
    if "msgspec" not in sys.modules and "typing_extensions" not in sys.modules:
        sys.modules["typing_extensions"] = None  # type: ignore[assignment]  # an import of it fails
        try:
            import_module("msgspec")
        finally:
            del sys.modules["typing_extensions"]


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
    greeting = load("mcp.handshake")
    wire = greeting.claim()
    prepared = greeting.load_prepared()
    opening = greeting.greet(wire, greeting.Handshake(prepared, greeting.load_tools(prepared, project)))
    if not opening.lines.is_ended:
        load("mcp.stdio_server").run(wire, opening, project)
