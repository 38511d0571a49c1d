"""Directives: a program for a model, written as XML in Markdown, read into the one manifest shape.

The mapping has `tool_id`, `tool_type: directive`, `version`, `executor: llm_runtime`, `description`, `category`,
`author`, `tags`, `parameters` (a list, from `inputs`) and `config`, whose words are:

- `model_tier` (text) and `model` ({tier, id, fallback, parallel, why}, all text)
- `permissions`: [{tag, attrs, content}], in order; an empty list grants nothing
- `limits`: {turns, tokens, spawns, depth: integers; duration: seconds; spend: number; spend_currency: text}
- `hooks`: [{when, directive, inputs}]
- `git_checkpoint`: `auto`, `explicit` or `disabled`
- `process`: [{name, description, action, …}]; other parts of a step stand beside these, as JSON
- `outputs`: an object of texts and lists; `success_criteria`: a list of texts
- `context`, `relationships`, `mcps`: objects, as JSON
- `extra`: whatever else was written, by tag, as JSON
"""

from __future__ import annotations

from collections.abc import Iterator

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.manifest.directive_parts import CHECKPOINTS, hooks_of, inputs_of, limits_of
from kiwi_mcp.manifest.directive_xml import Element, read_xml

_METADATA = {
    "description", "category", "author", "tags", "model", "model_class", "permissions", "limits", "cost", "hooks",
    "git_checkpoint", "relationships", "mcps", "context",
}  # fmt: skip
_PARTS = {"metadata", "inputs", "process", "outputs", "success_criteria", "context", "hooks", "permissions"}


def read_directive(text: str, *, what: str) -> JsonObject:
    """Return the manifest of a directive; raise `InvalidManifest` with every fault in it."""
    root = read_xml(text, what=what)
    metadata = root.first("metadata") or Element("metadata", {}, root.line)
    issues = list(_identity_issues(root))
    parameters = inputs_of(root.first("inputs"), issues)
    config = _config(root, metadata, issues)
    if issues:
        raise InvalidManifest(what, issues)
    manifest: dict[str, Json] = {
        "tool_id": root.attributes["name"],
        "tool_type": "directive",
        "version": root.attributes["version"],
        "executor": "llm_runtime",
        "description": " ".join(metadata.text_at("description").split()),
        "parameters": parameters,
        "config": config,
    }
    for word in ("category", "author"):
        if written := metadata.text_at(word):
            manifest[word] = written
    if tags := _tags(metadata.first("tags")):
        manifest["tags"] = tags
    return manifest


def program(text: str, *, what: str = "The directive") -> JsonObject:
    """Return what a model needs to act on a directive, and nothing else."""
    manifest = read_directive(text, what=what)
    config = as_object(manifest["config"])
    kept = {word: config[word] for word in ("context", "outputs", "success_criteria") if word in config}
    return {
        "name": manifest["tool_id"],
        "description": manifest["description"],
        "version": manifest["version"],
        "inputs": manifest["parameters"],
        "process": config["process"],
        **kept,
    }


def _identity_issues(root: Element) -> Iterator[Issue]:
    for word, example in (("name", "my_directive"), ("version", "1.0.0")):
        if not root.attributes.get(word, "").strip():
            yield Issue(
                word, f"<directive> has no `{word}`", f'Write <directive {word}="{example}" …>.', line=root.line
            )


def _config(root: Element, metadata: Element, issues: list[Issue]) -> JsonObject:
    model = metadata.first("model", "model_class")
    config: dict[str, Json] = {
        "model_tier": model.attributes.get("tier", "") or model.text if model else "",
        "model": _model(model) if model else None,
        "permissions": _permissions(metadata.first("permissions") or root.first("permissions")),
        "limits": limits_of(metadata, issues),
        "hooks": hooks_of(metadata.first("hooks") or root.first("hooks"), issues),
        "git_checkpoint": _checkpoint(metadata.first("git_checkpoint"), issues),
        "process": [_step(step) for process in root.named("process") for step in process.named("step")],
        "outputs": _outputs(root.first("outputs")),
        "success_criteria": _criteria(root.first("success_criteria")),
        "extra": _extra(root, metadata),
    }
    for word in ("context", "relationships", "mcps"):
        if found := metadata.first(word) or root.first(word):
            config[word] = _object(found)
    always = {"permissions", "process"}
    return {word: value for word, value in config.items() if value or word in always}


def _model(model: Element) -> JsonObject:
    spelled = {"model_id": "id", "fallback_id": "fallback"}
    read = {spelled.get(name, name): value for name, value in model.attributes.items()}
    return {name: value for name, value in {**read, "why": model.text}.items() if value}


def _permissions(permissions: Element | None) -> list[JsonObject]:
    return [
        {"tag": each.tag, "attrs": dict(each.attributes), "content": each.text}
        for each in (permissions.children if permissions else ())
    ]


def _checkpoint(checkpoint: Element | None, issues: list[Issue]) -> str:
    if checkpoint is None:
        return ""
    mode = (checkpoint.attributes.get("mode") or checkpoint.text or "explicit").lower()
    if mode not in CHECKPOINTS:
        fix = f"Use one of {', '.join(sorted(CHECKPOINTS))}."
        issues.append(Issue("git_checkpoint", f"{mode!r} is not a mode of checkpoints", fix, line=checkpoint.line))
    return mode


def _step(step: Element) -> JsonObject:
    others = [child for child in step.children if child.tag not in {"description", "action"}]
    read: dict[str, Json] = {
        "name": step.attributes.get("name", ""),
        "description": " ".join(step.text_at("description").split()),
        "action": step.text_at("action"),
    }
    if not read["action"]:  # the step itself says what to do, in words or in elements
        inner = [part for part in step.content if isinstance(part, str) or part.tag != "description"]
        return read | {"action": Element("action", {}, step.line, inner).text}
    for child in others:
        read.setdefault(child.tag, child.to_json())
    return read


def _outputs(outputs: Element | None) -> JsonObject:
    if outputs is None:
        return {}
    read: dict[str, Json] = {
        child.tag: child.text if not child.attributes else child.to_json()
        for child in outputs.children
        if child.tag != "output"
    }
    fields: list[Json] = [{**each.attributes, "description": each.text} for each in outputs.named("output")]
    if fields:
        read["fields"] = fields
    return read if outputs.children else {"text": outputs.text}


def _criteria(criteria: Element | None) -> list[str]:
    if criteria is None:
        return []
    return [child.text for child in criteria.children] or [line for line in criteria.text.splitlines() if line.strip()]


def _tags(tags: Element | None) -> list[str]:
    if tags is None:
        return []
    written = [child.text for child in tags.children] or tags.text.replace(",", " ").split()
    return [tag for tag in written if tag]


def _extra(root: Element, metadata: Element) -> JsonObject:
    read: dict[str, Json] = {name: value for name, value in root.attributes.items() if name not in {"name", "version"}}
    unknown = [child for child in metadata.children if child.tag not in _METADATA]
    unknown += [child for child in root.children if child.tag not in _PARTS]
    for child in unknown:
        seen = read.get(child.tag)
        value = child.to_json()
        read[child.tag] = value if seen is None else [*(seen if isinstance(seen, list) else [seen]), value]
    return read


def _object(element: Element) -> JsonObject:
    value = element.to_json()
    return {"_text": value} if isinstance(value, str) else as_object(value)
