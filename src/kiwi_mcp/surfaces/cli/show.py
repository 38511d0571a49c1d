"""How answers look to a person. Data goes to stdout, talk to stderr; `--json` shows the answer itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.cli.approval_views import VIEWS as APPROVAL_VIEWS
from kiwi_mcp.surfaces.cli.audit_views import VIEWS as AUDIT_VIEWS
from kiwi_mcp.surfaces.cli.key_views import VIEWS as KEY_VIEWS
from kiwi_mcp.surfaces.cli.mcp_views import VIEWS as MCP_VIEWS
from kiwi_mcp.surfaces.cli.memory_views import VIEWS as MEMORY_VIEWS
from kiwi_mcp.surfaces.cli.prefer_views import VIEWS as PREFER_VIEWS
from kiwi_mcp.surfaces.cli.registry_views import VIEWS as REGISTRY_VIEWS
from kiwi_mcp.surfaces.cli.relax_views import VIEWS as RELAX_VIEWS
from kiwi_mcp.surfaces.cli.screen import Screen, issue_text, show_message, show_warnings, talk
from kiwi_mcp.surfaces.cli.search_views import VIEWS as SEARCH_VIEWS
from kiwi_mcp.surfaces.cli.secret_views import VIEWS as SECRET_VIEWS
from kiwi_mcp.surfaces.cli.task_views import VIEWS as TASK_VIEWS
from kiwi_mcp.surfaces.cli.undo_views import VIEWS as UNDO_VIEWS

_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
_SHORT = 12


def show(answer: Answer, *, verb: str, is_json: bool, is_raw: bool = False) -> None:
    """Show one answer."""
    screen = Screen(is_raw)
    if is_json:
        screen.json(answer.content)
    elif answer.is_error:
        _error(answer.content)
    else:
        _VIEWS.get(verb, show_message)(answer.content, screen)


def _error(content: JsonObject) -> None:
    logs = as_object(content.get("logs"))
    for name in ("stdout", "stderr"):
        if printed := as_text(logs.get(name)).rstrip():
            talk(printed)
    show_warnings(content)
    talk(f"error: {as_text(content.get('message')) or as_text(content.get('error'))}")
    issues = [as_object(issue) for issue in as_list(content.get("issues"))]
    for issue in issues:
        talk(issue_text(issue))
    if (result := content.get("result")) is not None:
        talk(f"reply: {text_of(result)[:2000]}")
    if diff := as_text(content.get("diff")):
        talk(diff.rstrip())
    hint = as_text(content.get("suggestion"))
    if hint and hint not in [issue.get("fix") for issue in issues]:
        talk(f"hint: {hint}")


def _run(content: JsonObject, screen: Screen) -> None:
    show_warnings(content)
    logs = as_object(content.get("logs"))
    for name in ("stdout", "stderr"):
        if printed := as_text(logs.get(name)).rstrip():
            talk(printed)
    if content.get("status") == "planned":
        screen.json(content.get("plan"))
        return
    result = content.get("result")
    if isinstance(result, str):
        screen.data(result)
    else:
        screen.json(result)
    if handle := as_text(content.get("result_handle")):
        talk(f"That is the beginning of {content.get('result_characters')} characters.")
        talk(f"hint: kiwi load --type output {handle} --offset {len(as_text(result))}")
    if logs.get("truncated"):
        talk(f"warning: the output was cut; the tool wrote {logs.get('stdout_bytes')} bytes to standard output.")
    kept = as_text(content.get("output_path"))
    took = f"{content.get('execution_time_ms')} ms"
    talk(f"{content.get('tool_id')}: {content.get('status')} in {took}{f' · {kept}' if kept else ''}")
    _checkpoint(as_object(content.get("checkpoint")))


def _checkpoint(told: JsonObject) -> None:
    if hint := as_text(told.get("hint")):
        talk(f"hint: {hint}")
    if run_id := as_text(told.get("undo")):
        talk(f"hint: `kiwi undo {run_id}` puts back what it changed.")


def _load(content: JsonObject, screen: Screen) -> None:
    if "identity" not in content:
        screen.data(as_text(content.get("content")))
        if (following := content.get("next_offset")) is not None:
            talk(f"hint: go on with --offset {following}")
        return
    if message := as_text(content.get("message")):
        screen.data(message)
        talk(f"  path: {as_text(content.get('path'))}")
        return
    talk(f"{as_text(content.get('identity'))} ({_vouched(content)}) {as_text(content.get('path'))}")
    if chain := as_list(content.get("chain")):
        talk("chain: " + " → ".join(map(text_of, chain)))
    for name, schema in as_object(as_object(content.get("parameters")).get("properties")).items():
        talk(f"  {name}: {_parameter(name, as_object(schema), content)}")
    screen.data(as_text(content.get("content")))


def _vouched(item: JsonObject) -> str:
    """Return who vouches for an item, where a key does; otherwise whether it is what it was."""
    signer, trust = as_text(item.get("signer")), as_text(item.get("trust"))
    return f"{trust.replace('_', ' ')}, {signer}" if signer else as_text(item.get("integrity"))


def _parameter(name: str, schema: JsonObject, content: JsonObject) -> str:
    words = [text_of(schema.get("type", "any"))]
    if name in as_list(as_object(content.get("parameters")).get("required")):
        words.append("required")
    if "default" in schema:
        words.append(f"default {text_of(schema['default'])}")
    if "enum" in schema:
        words.append("one of " + ", ".join(map(text_of, as_list(schema["enum"]))))
    described = as_text(schema.get("description"))
    return ", ".join(words) + (f": {described}" if described else "")


def _validate(content: JsonObject, screen: Screen) -> None:
    issues = [as_object(issue) for issue in as_list(content.get("issues"))]
    for issue in issues:
        screen.data(issue_text(issue))
    show_warnings(content)
    count = len(issues)
    talk(
        f"{content.get('tool_id')}: valid"
        if not issues
        else f"{content.get('tool_id')}: {count} issue{'s' * (count != 1)}"
    )


def _why(content: JsonObject, screen: Screen) -> None:
    # A chain that does not resolve comes as names alone; its reason below draws it.
    links = [link for link in as_list(content.get("chain")) if isinstance(link, Mapping)]
    for depth, link in enumerate(links):
        branch = "   " * (depth - 1) + "└─ " if depth else ""
        digest = as_text(link.get("digest"))[:_SHORT]
        state = f"{link['tool_type']}  {_vouched(link)}  {digest}"
        screen.data(f"{branch}{link['tool_id']} {link['version']}  {state}  {link['path']}")
    if held := as_object(content.get("isolation")):
        screen.data(_holding(held))
    for name, place in as_object(content.get("variables")).items():
        screen.data(f"${{{name}}}  {place or 'not set'}")
    for row in map(as_object, as_list(content.get("rights"))):
        screen.data(_right(row))
    for change in as_list(content.get("lockfile")):
        screen.data(f"changed since signing: {text_of(change)}")
    for note in (*as_list(content.get("notes")), *as_list(content.get("shadowed"))):
        screen.data(f"note: {text_of(note)}")
    if (approval := as_object(content.get("approval"))).get("needed"):
        screen.data(f"asks you first: it {'; '.join(map(text_of, as_list(approval.get('reasons'))))}")
    elif rule := as_text(approval.get("rule_id")):
        screen.data(f"asks nobody, by your rule {rule}")
    screen.data("would run: " + ("yes" if content.get("would_run") else "no"))
    for reason in map(as_object, as_list(content.get("reasons"))):
        screen.data(f"  ✗ {as_text(reason.get('message'))}\n      fix: {as_text(reason.get('suggestion'))}")


def _right(row: JsonObject) -> str:
    """Return what a call uses, whether it may, and the rules that say so, one after the other."""
    steps = [
        f"{as_text(step.get('grant'))}: {as_text(step.get('rule')) or 'no rule'}"
        for step in map(as_object, as_list(row.get("rules")))
    ]
    mark = "✓" if row.get("allowed") else "✗"
    return f"{mark} {as_text(row.get('kind'))} {as_text(row.get('resource'))}  ({' → '.join(steps)})"


def _holding(held: JsonObject) -> str:
    """Return how strictly a process is held, why, and what would change it."""
    provenance, by = as_text(held.get("provenance")), as_text(held.get("decided_by"))
    said = {"manifest": "its manifest asks for it", "owner": "the owner said so", "deployment": "this machine says so"}
    reason = said.get(by, f"{by} is {provenance}")
    change = f"\n  {as_text(held['change'])}" if "change" in held else ""
    return f"isolation: {as_text(held.get('level'))} ({reason}){change}"


def _doctor(content: JsonObject, screen: Screen) -> None:
    for check in map(as_object, as_list(content.get("checks"))):
        screen.data(
            f"{_MARKS[as_text(check.get('status'))]} {as_text(check.get('check'))}: {as_text(check.get('detail'))}"
        )
        if fix := as_text(check.get("fix")):
            screen.data(f"    fix: {fix}")


def _help(content: JsonObject, screen: Screen) -> None:
    screen.data(as_text(content.get("help")).rstrip())
    talk(f"topics: {', '.join(map(text_of, as_list(content.get('topics'))))}")


_VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = {
    "run": _run,
    "load": _load,
    "validate": _validate,
    "why": _why,
    "doctor": _doctor,
    "help": _help,
    **SEARCH_VIEWS,
    **REGISTRY_VIEWS,
    **MCP_VIEWS,
    **MEMORY_VIEWS,
    **PREFER_VIEWS,
    **SECRET_VIEWS,
    **KEY_VIEWS,
    **TASK_VIEWS,
    **UNDO_VIEWS,
    **RELAX_VIEWS,
    **AUDIT_VIEWS,
    **APPROVAL_VIEWS,
}


def payload(**words: Json) -> JsonObject:
    """Return a request without the words that were not given."""
    return {name: value for name, value in words.items() if value is not None}
