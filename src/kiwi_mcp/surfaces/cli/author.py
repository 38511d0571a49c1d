"""The loop of an author: a new file from a template, a run at every save, signatures."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import termios
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kiwi_mcp import data
from kiwi_mcp.domain.calls import no_answers
from kiwi_mcp.domain.errors import Denied
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.verbs import by_wire
from kiwi_mcp.surfaces.cli import session
from kiwi_mcp.surfaces.cli.actions import call_parameters
from kiwi_mcp.surfaces.cli.help import UsageError
from kiwi_mcp.surfaces.cli.prompts import confirm, owner_prompt
from kiwi_mcp.surfaces.cli.screen import Screen, talk
from kiwi_mcp.surfaces.cli.session import CliSession, request_of

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow

_KINDS = {
    "python": "python.py",
    "bash": "bash.sh",
    "node": "node.mjs",
    "api": "api.yaml",
    "mcp": "mcp",
    "directive": "directive.md",
    "knowledge": "knowledge.md",
    "skill": "skill",
    "thread": "thread.yaml",
    "composite": "composite.yaml",
}
_NEXT_TEXT = "Edit it, then `kiwi run {name}`; `kiwi sign {name}` signs it."
_NEXT_CODE = "Edit it: `kiwi dev {name}` checks and runs it at every save, and signs it at the key s."
_NEXT = {
    **dict.fromkeys(("python", "bash", "node", "api"), _NEXT_CODE),
    "skill": "Edit it, then `kiwi sign {name}`: models follow a signed skill, and read an unsigned one as data.",
    "mcp": "`kiwi mcp refresh {name} --yes` starts it and lists its tools; `kiwi mcp accept {name}` lets you use them.",
}
_PARTS = {"thread": [("directive", "steps")], "composite": [("bash", "greet")]}
"""What is made with an item, since it names it."""
_TEXTS = ("directive", "knowledge", "skill")
_LOOK = 0.2
"""How often the files of an item are looked at, in seconds."""


def new(_: CommandRow, options: JsonObject) -> int:
    """Write a new item from a template."""
    kinds, name, cli = [kind for kind in _KINDS if options.get(kind)], as_text(options["name"]), CliSession(options)
    if len(kinds) != 1:
        raise UsageError("Say what the new item is.", f"Add one of {', '.join(f'--{kind}' for kind in _KINDS)}.")
    steps = [(kind, f"{name}_{word}") for kind, word in _PARTS.get(kinds[0], ())]
    where = {"location": options["location"]} if "location" in options else {}
    for kind, item in (*steps, (kinds[0], name)):
        parameters = {**_content(kind, item), **where}
        request: JsonObject = {"action": "create", "item_id": item, "parameters": parameters}
        answer = cli.call("execute", {**request, "item_type": kind} if kind in _TEXTS else request)
        if answer.is_error or cli.is_json:
            cli.show(answer, None)
        else:
            Screen().data(as_text(answer.content["path"]))
        if answer.is_error:
            return answer.exit_code
    if not cli.is_json:
        talk(f"hint: {_NEXT.get(kinds[0], _NEXT_TEXT).format(name=name)}")
    return 0


def _content(kind: str, name: str) -> JsonObject:
    """Return what a new item is created from: one file, or the files of a folder."""
    place = data.FOLDER / "new" / _KINDS[kind]
    # A shim such as that of pyenv does not work in a sandbox.
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or "python3"

    def filled(template: Path) -> str:
        return template.read_text(encoding="utf-8").replace("NAME", name).replace("PYTHON", python)

    if place.is_dir():
        return {"files": {file.name: filled(file) for file in place.iterdir() if file.is_file()}}
    return {"content": filled(place), "filename": f"{name}{place.suffix}"}


def sign(row: CommandRow, options: JsonObject) -> int:
    """Sign items one by one; `.` is all that is new or changed in the project, after one question."""
    cli, named = CliSession(options), [as_text(options["item_id"]), *map(as_text, as_list(options.get("more")))]
    items = _confirmed(cli) if named == ["."] else [{"item_id": name} for name in named]
    if items is None:
        return Denied.exit_code
    code = 0
    for item in items:
        code = cli.tell(row, request_of(row, {**options, **item})) or code
    return code


def _confirmed(cli: CliSession) -> list[dict[str, Json]] | None:
    """Return what is new or changed and shall be signed, as it was shown; None if the person does not want it."""
    if owner_prompt(is_yes=False) is no_answers:
        raise UsageError(
            "`kiwi sign .` asks before it signs, and there is no terminal to ask on.",
            "Name the items: `kiwi sign A B`.",
        )
    found = cli.read(Kernel.unsigned_items)
    if not found:
        talk("Everything in this project is signed.")
        return []
    listed = "\n".join(f"  {item.state:<20} {item.files}" for item in found)
    question = f"New or changed since it was signed:\n{listed}\nSign all of it as yours?"
    shown: list[dict[str, Json]] = [{"item_id": item.identity, "digest": item.digest} for item in found]
    return shown if confirm(question, is_yes=False) else None


def dev(_: CommandRow, options: JsonObject) -> int:
    """Validate and run an item at every save; `s` signs it, `r` runs it again, `q` ends."""
    work = _develop(CliSession(options), as_text(options["item_id"]), options)
    if not sys.stdin.isatty():
        return session.run(work)
    before = termios.tcgetattr(sys.stdin)
    single_keys = termios.tcgetattr(sys.stdin)
    # Not by `tty`: that copies the names of `termios` when it is imported, and finds none in the stand-in of that.
    single_keys[3] &= ~(termios.ECHO | termios.ICANON)
    single_keys[6][termios.VMIN] = 1
    single_keys[6][termios.VTIME] = 0
    termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, single_keys)
    try:
        return session.run(work)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


async def _develop(cli: CliSession, item: str, options: JsonObject) -> int:
    keys: asyncio.Queue[str] = asyncio.Queue()
    if sys.stdin.isatty():
        asyncio.get_running_loop().add_reader(
            sys.stdin, lambda: keys.put_nowait(os.read(sys.stdin.fileno(), 1).decode())
        )
    async with cli.opened() as kernel:
        place = kernel.place_of(item)
        request: JsonObject = {"action": "run", "item_id": item, **call_parameters(options, kernel)}
        tried: object = None
        while True:
            if _stamps(place) != tried:
                tried = await _try(cli, kernel, item, place, request)
                talk("waiting for a change (s: sign, r: run again, q: quit)")
            try:
                key = await asyncio.wait_for(keys.get(), _LOOK)
            except TimeoutError:
                continue
            if key == "q":
                return 0
            if key == "s":
                _show(cli, await cli.send(kernel, "execute", {"action": "sign", "item_id": item}), "sign")
            if key in {"s", "r"}:
                tried = None


async def _try(cli: CliSession, kernel: Kernel, item: str, place: Path, request: JsonObject) -> object:
    """Validate an item and, if it is valid, run it like any unsigned file; return the state that was tried."""
    tried = _stamps(place)
    checked = await cli.send(kernel, "execute", {"action": "validate", "parameters": {"path": str(place)}})
    _show(cli, checked, "validate")
    if not checked.is_error and checked.content.get("valid"):
        if _stamps(place) == tried:
            kernel.drop_stale_signature(item)
            tried = _stamps(place)
        _show(cli, await cli.send(kernel, "execute", request), "run")
    return tried


def _show(cli: CliSession, answer: Answer, action: str) -> None:
    cli.show(answer, by_wire(("execute", action)))


def _stamps(place: Path) -> list[tuple[str, int, int]]:
    """Return the state of an item's files; a file that an editor is replacing counts as gone."""
    stamps: list[tuple[str, int, int]] = []
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        with suppress(OSError):
            state = path.stat()
            stamps.append((str(path), state.st_mtime_ns, state.st_size))
    return stamps
