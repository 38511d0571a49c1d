"""Whether a run gets a checkpoint, and what stands around it: what the owner says, else the item, else who asks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Protocol, TypeAlias, get_args

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.paths import is_safe_path
from kiwi_mcp.domain.plan import Plan, ProcessSpec

Mode = Literal["auto", "explicit", "disabled"]
MODES: tuple[Mode, ...] = get_args(Mode)
_OFFER: JsonObject = {
    "saved": False,
    "hint": "This tool changes state. Send `checkpoint: true` (`--checkpoint`) to be able to undo a run.",
}
_ELSEWHERE: JsonObject = {"saved": False, "hint": "Nothing was saved: this item changes no file of the project."}


class Guard(Protocol):
    """Stands around a run: entered before it, left after it, however it ends."""

    @property
    def told(self) -> JsonObject | None:
        """What the answer tells of it."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could not be saved, and why."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *error: object) -> None: ...


Save: TypeAlias = Callable[[Chain, Plan, str], Awaitable[Guard]]
"""Gives the guard of a run, by its id."""


class Unguarded:
    """A run of which nothing is saved."""

    def __init__(self, told: JsonObject | None = None, warnings: tuple[str, ...] = ()) -> None:
        self.told = told
        self.warnings = warnings

    async def __aenter__(self) -> None:
        """Do nothing."""

    async def __aexit__(self, *error: object) -> None:
        """Do nothing."""


UNGUARDED = Unguarded()


async def unguarded(_: Chain, __: Plan, ___: str) -> Guard:
    """Save nothing."""
    return UNGUARDED


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted for one run."""

    is_made: bool = False
    is_asked: bool = False
    """Whether the call itself asks: then it is not made without."""
    is_offered: bool = False
    """Whether the item changes something, and nothing is saved unless the call asks."""
    is_disabled: bool = False
    is_elsewhere: bool = False
    """Whether the item acts through no process here, and so changes no file."""
    paths: tuple[str, ...] = ()
    """What the item says it changes, below the project."""


NOTHING = Wish()


def wish(manifest: Manifest, plan: Plan, owner: str, *, is_asked: bool) -> Wish:
    """Return what is wanted for a run of an item; what acts elsewhere alone changes no file here."""
    if not (is_asked or manifest.mutates_state):
        return NOTHING
    if not isinstance(plan.spec, ProcessSpec):
        return Wish(is_asked=is_asked, is_elsewhere=True)
    written = manifest.extra.get("checkpoint")
    mode = mode_of(owner) or mode_of(written) or "explicit"
    is_made = mode != "disabled" and (is_asked or mode == "auto")
    # What a server behind MCP does is mostly not about this folder, and saying so at every call would teach nobody.
    is_offered = mode == "explicit" and not is_asked and plan.driver == "process"
    is_offered = is_offered and manifest.written.get("mutates_state") is True
    return Wish(is_made, is_asked, is_offered, is_disabled=mode == "disabled", paths=_changed(manifest, written))


async def guard_of(space: Space, owner: str, chain: Chain, plan: Plan, run_id: str, *, is_asked: bool) -> Guard:
    """Return the guard of a run: a checkpoint where one is wanted, the word of the owner counting most."""
    tool = chain.tool
    wanted = wish(tool.manifest, plan, owner, is_asked=is_asked)
    if wanted.is_made:
        # What makes checkpoints is loaded when the first is made.
        begin: Callable[[Space, str, str, Wish], Awaitable[Guard]]
        begin = import_module("kiwi_mcp.kernel.checkpoints.checkpoint").begin
        return await begin(space, tool.id, run_id, wanted)
    if wanted.is_disabled and wanted.is_asked:
        raise not_made(f"checkpoints of {tool.id!r} are disabled.")
    if wanted.is_elsewhere and wanted.is_asked:
        return Unguarded(_ELSEWHERE)
    return Unguarded(_OFFER) if wanted.is_offered else UNGUARDED


def not_made(reason: str) -> Unavailable:
    """Return the error for a checkpoint that was asked for and cannot be had."""
    return Unavailable(
        f"A checkpoint was asked for and cannot be made: {reason}",
        suggestion="Nothing ran. Mend that, or run without `checkpoint`.",
    )


def mode_of(written: Json) -> Mode | None:
    """Return the mode that a manifest or the owner's policy says, alone or beside paths.

    Whoever wrote a word that is none wanted something, so that saving is on the safe side.
    """
    word = as_object(written).get("mode") if isinstance(written, Mapping) else written
    return next((mode for mode in MODES if mode == word), "auto" if word else None)


def _changed(manifest: Manifest, written: Json) -> tuple[str, ...]:
    """Return the paths below the project that an item says it changes or, where it does not, that it needs to write."""
    needed = (text.removesuffix("/**").rstrip("/") for text in manifest.needs.write)
    return paths_of(written) or tuple(path for path in needed if is_safe_path(path))


def paths_of(written: Json) -> tuple[str, ...]:
    """Return the paths below the project that a manifest says its item changes."""
    listed = map(as_text, as_list(as_object(written).get("paths")))
    return tuple(path for path in listed if is_safe_path(path))
