"""How answers about undoing look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_warnings, talk

_NAMED = 3


def _list(content: JsonObject, screen: Screen) -> None:
    checkpoints = [as_object(one) for one in as_list(content.get("checkpoints"))]
    for one in checkpoints:
        paths = [as_text(as_object(change).get("path")) for change in as_list(one.get("changed"))]
        more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
        told = "did not come to its end" if one.get("unfinished") else ", ".join(paths[:_NAMED]) + more
        undone = f"  (undid {as_text(one['undoes'])})" if "undoes" in one else ""
        screen.line(f"{as_text(one.get('run_id'))}  {as_text(one.get('tool_id')):<20}  {told}{undone}")
    if not checkpoints:
        talk("No run of this project can be undone.")
        talk(
            "hint: `kiwi run TOOL --checkpoint` saves the files first; so does `checkpoint: auto` in ~/.ai/policy.yaml."
        )


def _apply(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    for change in map(as_object, as_list(content.get("changed"))):
        talk(f"  {as_text(change.get('change')):<9} {as_text(change.get('path'))}")
    for doubt in as_list(content.get("doubts")):
        talk(f"warning: {text_of(doubt)}")
    if diff := as_text(content.get("diff")):
        screen.data(diff.rstrip())
    if drift := as_text(content.get("drift")):
        talk(f"changed since the run:\n{drift.rstrip()}")
    if left_out := as_list(content.get("left_out")):
        talk(f"left alone: {', '.join(map(text_of, left_out))}")
    talk(as_text(content.get("message")))
    if own := as_text(content.get("undo")):
        talk(f"hint: `kiwi undo {own}` takes this back.")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType({"undo list": _list, "undo apply": _apply})
