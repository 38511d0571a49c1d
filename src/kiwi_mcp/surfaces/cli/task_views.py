"""How answers about tasks look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_message, talk


def _list(content: JsonObject, screen: Screen) -> None:
    tasks = [as_object(one) for one in as_list(content.get("tasks"))]
    for task in tasks:
        at, status = as_text(task.get("created_at"))[:19], as_text(task.get("status"))
        words = [as_text(task.get(word)) for word in ("identity", "principal", "message")]
        words[1] = f"for {words[1]}" if words[1] else ""
        screen.line(f"{as_text(task.get('task_id'))}  {at}  {status:<14}  {'  '.join(filter(None, words))}")
    if tasks:
        talk("hint: `kiwi tasks TASK` shows one whole, `--cancel` stops it; the first 4 characters are enough.")
    else:
        talk("No tasks to show.")


def _show(content: JsonObject, screen: Screen) -> None:
    for word, value in content.items():
        screen.data(f"{f'{word}:':<12} {text_of(value)}")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"tasks list": _list, "tasks show": _show, "tasks cancel": show_message}
)
