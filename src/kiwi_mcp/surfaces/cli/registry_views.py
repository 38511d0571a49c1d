"""How answers about versions, runs and registries look to a person."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from textwrap import indent
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, issue_text, show_message, show_warnings, talk

_RESULT_WORDS = frozenset({"result", "result_is_preview", "result_characters", "result_handle", "logs"})
_SHORT = 19
"""How much of a digest is enough to tell it apart: `sha256:` and twelve digits."""


def _place(url: str) -> str:
    """Return where a store is, as a sentence says it: a file by its path."""
    return url.removeprefix("sqlite:///")


def _digest(content: JsonObject, word: str = "digest") -> str:
    return as_text(content.get(word))[:_SHORT]


def _publish(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    screen.data(as_text(content.get("message")))
    talk(f"  digest: {as_text(content.get('digest'))}")
    if closure := as_text(content.get("closure")):
        talk(f"  closure: {closure}")
    for name in as_list(content.get("also_published")):
        talk(f"  with: {text_of(name)}")
    if remote := as_text(content.get("to")):
        talk(f"  to: {remote}")
    talk(f"hint: {as_text(content.get('next'))}")


def _pull(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    screen.data(as_text(content.get("message")))
    for depth, link in enumerate(map(as_object, as_list(content.get("chain")))):
        branch = "   " * (depth - 1) + "└─ " if depth else ""
        talk(f"  {branch}{as_text(link.get('identity'))}  {_digest(link)}")
    if closure := as_text(content.get("closure")):
        talk(f"  closure: {closure}")
    if hint := as_text(content.get("next")):
        talk(f"hint: {hint}")


def _versions(content: JsonObject, screen: Screen) -> None:
    for version in map(as_object, as_list(content.get("versions"))):
        marks = [word for word in ("yanked", "deprecated") if word in version]
        state = ", ".join((["latest"] if version.get("is_latest") else []) + marks)
        at, by = as_text(version.get("published_at"))[:10], as_text(version.get("published_by"))
        changelog = as_text(version.get("changelog")).partition("\n")[0]
        line = f"{as_text(version.get('version')):<14} {at} {by:<12} {_digest(version)}  {state:<18} {changelog}"
        screen.line(line.rstrip())
        for word in marks:
            if reason := as_text(as_object(version[word]).get("reason")):
                screen.line(f"{'':<14} {word}: {reason}")


def _diff(content: JsonObject, screen: Screen) -> None:
    sides = [as_object(content.get(word)) for word in ("from", "to")]
    talk(" → ".join(as_text(side.get("identity")) for side in sides))
    for change in map(as_object, as_list(content.get("changes"))):
        if "executable" in change:
            word = "is executable now" if change["executable"] else "is not executable any more"
            talk(f"{as_text(change.get('path'))} {word}")
        if difference := as_text(change.get("diff")).rstrip("\n"):
            screen.data(difference)
        elif "from_bytes" in change:
            sizes = f"{change['from_bytes']} → {change['to_bytes']} bytes"
            screen.data(f"{as_text(change.get('path'))} {as_text(change.get('change'))} ({sizes})")
        elif change.get("truncated"):
            screen.data(f"{as_text(change.get('path'))} {as_text(change.get('change'))} (too long to show)")
    if content.get("status") == "same":
        talk("Nothing differs.")


def _mark(content: JsonObject, screen: Screen) -> None:
    if content.get("status") == "planned":
        _versions(content, screen)
        talk(as_text(content.get("message")))
        return
    show_message(content, screen)
    if latest := as_text(content.get("latest")):
        talk(f"  latest: {latest}")


def _verify(content: JsonObject, screen: Screen) -> None:
    for issue in map(as_object, as_list(content.get("issues"))):
        screen.data(issue_text(issue))
    count, place = content.get("checked"), _place(as_text(content.get("registry")))
    talk(f"{as_text(content.get('message'))}: {count} version{'s' * (count != 1)} in {place}")


def _list(content: JsonObject, screen: Screen) -> None:
    items = [as_object(one) for one in as_list(content.get("items"))]
    width = max((len(f"{one.get('namespace')}/{one.get('name')}") for one in items), default=0)
    for one in items:
        name = f"{as_text(one.get('namespace'))}/{as_text(one.get('name'))}".ljust(width)
        version, kind = as_text(one.get("version")), as_text(one.get("tool_type"))
        marks = "".join(f" ({word})" for word in ("yanked", "deprecated") if word in one)
        if signer := as_text(one.get("signer")):
            marks += f" ({as_text(one.get('trust')).replace('_', ' ')}, {signer})"
        marks += "".join(f" (looks like {text_of(near)})" for near in as_list(one.get("looks_like")))
        screen.line(f"{name}  {version:<10} {kind:<12} {as_text(one.get('description'))}{marks}")
    talk(f"{len(items)} item{'s' * (len(items) != 1)} in {_place(as_text(content.get('registry')))}")
    if hint := as_text(content.get("suggestion")):
        talk(f"hint: {hint}")


def _runs(content: JsonObject, screen: Screen) -> None:
    runs = [as_object(one) for one in as_list(content.get("runs"))]
    for run in runs:
        at, took = as_text(run.get("started_at"))[:19], f"{run.get('duration_ms')} ms"
        name, status = as_text(run.get("tool_id")), as_text(run.get("status"))
        message = as_text(run.get("message")).partition("\n")[0]
        screen.line(
            f"{as_text(run.get('id'))}  {at}  {status:<11} {took:>9}  {name}{f'  {message}' if message else ''}"
        )
    if not runs:
        talk(as_text(content.get("suggestion")) or "No runs to show.")
    if following := as_text(content.get("next")):
        talk(f"hint: go on with --before {following}")


def _run(content: JsonObject, screen: Screen) -> None:
    for word, value in content.items():
        if word not in _RESULT_WORDS:
            screen.data(f"{f'{word}:':<14} {text_of(value)}")
    logs = as_object(content.get("logs"))
    for name in ("stdout", "stderr"):
        if printed := as_text(logs.get(name)).rstrip():
            screen.data(f"{name}:\n{indent(printed, '  ')}")
    if "result" in content:
        result = content["result"]
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, indent=2)
        screen.data(f"result:\n{indent(text, '  ')}")
        if content.get("result_is_preview"):
            talk(f"That is the beginning of {content.get('result_characters')} characters.")
            talk(f"hint: kiwi load --type output {_handle(content)} --project {as_text(content.get('project'))}")


def _handle(content: JsonObject) -> str:
    return f"{as_text(content.get('result_handle'))} --offset {len(as_text(content.get('result')))}"


def _registry(content: JsonObject, screen: Screen) -> None:
    screen.data(f"store: {_place(as_text(content.get('registry')))} ({content.get('versions')} versions)")
    names = ", ".join(map(text_of, as_list(content.get("namespaces"))))
    screen.data(f"as: {as_text(content.get('actor'))}, in {names}")
    for name, remote in as_object(content.get("remotes")).items():
        screen.data(f"remote: {name}  {as_text(as_object(remote).get('url'))}")


def _exchange(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    would = "would be " if content.get("status") == "planned" else ""
    screen.data(f"{as_text(content.get('remote'))}: {would}{as_text(content.get('message'))}")
    for name in as_list(content.get("new")):
        talk(f"  + {text_of(name)}")
    for reason in as_list(content.get("left_out")):
        talk(f"warning: left out {text_of(reason)}")


def _migrate(content: JsonObject, screen: Screen) -> None:
    for item in map(as_object, as_list(content.get("items"))):
        name = as_text(item.get("tool_id")) or as_text(item.get("from")).rpartition("/")[2]
        state = f" ({as_text(item['integrity'])})" if "integrity" in item else ""
        place = f" → {as_text(item['to'])}" if "to" in item else ""
        reason = f": {as_text(item['reason'])}" if "reason" in item else ""
        screen.data(f"{as_text(item.get('what')):<8} {name}{state}{place}{reason}")
        if content.get("status") == "planned" and (manifest := as_text(item.get("manifest"))):
            screen.data(indent(manifest.rstrip(), "    "))
        for issue in as_list(item.get("issues")):
            talk(issue_text(as_object(issue)))
    if left_off := content.get("left_off"):
        talk(f"… and {left_off} more")
    talk(as_text(content.get("message")))
    if hint := as_text(content.get("next")):
        talk(f"hint: {hint}")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {
        "publish": _publish,
        "pull": _pull,
        "versions": _versions,
        "diff": _diff,
        "mark": _mark,
        "verify": _verify,
        "list": _list,
        "runs list": _runs,
        "runs show": _run,
        "registry show": _registry,
        "exchange": _exchange,
        "migrate": _migrate,
    }
)
