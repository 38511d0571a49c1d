"""Skills: `SKILL.md` in the format of agentskills.io, or one Markdown file; the tools that a skill allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kiwi_mcp.domain.grants import Grant
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.names import Version, is_tool_id
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.knowledge import front_matter
from kiwi_mcp.manifest.permissions import grant_of

_ALLOWED = "allowed-tools"
_WORDS = ("license", "compatibility", "metadata")
_KNOWN = frozenset({*_WORDS, _ALLOWED, "name", "description", "version", "category", "tags", "author"})
_NO_VERSION = "0.1.0"
_NAME_LENGTH, _DESCRIPTION_LENGTH, _COMPATIBILITY_LENGTH = 64, 1_024, 500
_TOOL = lazy_pattern(r"[^\s,()]+(?:\([^()]*\))?")
_NUMBERS = lazy_pattern(r"[0-9]+(?:\.[0-9]+)?")
_FILE: JsonObject = {
    "type": "object",
    "properties": {"file": {"type": "string", "description": "One of its files, such as references/forms.md"}},
    "additionalProperties": False,
}


def read_skill(text: str, *, what: str, stem: str) -> tuple[JsonObject, tuple[Issue, ...]]:
    """Return the manifest of a skill, which has the name of its folder or file, and its issues."""
    front, content = front_matter(text, what)
    first = next((line.strip("# \t") for line in content.splitlines() if line.strip("# \t")), "")
    config: dict[str, Json] = {word: front[word] for word in _WORDS if word in front}
    if _ALLOWED in front:
        config["allowed_tools"] = [*_allowed(front[_ALLOWED])]
    if extra := {word: value for word, value in front.items() if word not in _KNOWN}:
        config["extra"] = extra
    value: JsonObject = {
        "tool_id": stem,
        "version": _version(front),
        "description": as_text(front.get("description")).strip() or first[:_DESCRIPTION_LENGTH],
        **{word: front[word] for word in ("category", "tags", "author") if word in front},
        "config": config,
        "parameters": _FILE,
    }
    return value, tuple(_issues(front, stem))


def skill_grant(skill_id: str, allowed: Sequence[str]) -> Grant:
    """Return what may be used while a skill applies, as a grant that narrows others and gives nothing by itself."""
    tools = [name for name in allowed if is_known_form(name)]
    return grant_of({"tools": tools, "skills": ["*"]}, f"the skill {skill_id}")


def is_known_form(name: str) -> bool:
    """Whether a word of `allowed-tools` can name items here; `Bash(git:*)` is a restriction of another program."""
    return all(is_tool_id(part.replace("*", "x")) for part in name.split("/"))


def _allowed(written: Json) -> Sequence[str]:
    texts = map(as_text, as_list(written)) if isinstance(written, list) else (text_of(written),)
    return [found for text in texts for found in _TOOL.findall(text)]


def _version(front: JsonObject) -> str:
    """Return the version: that of the front matter or of its metadata, where `1.0` means `1.0.0`."""
    written = front.get("version") or as_object(front.get("metadata")).get("version") or _NO_VERSION
    text = text_of(written)
    if _NUMBERS.fullmatch(text):
        text += ".0" * (2 - text.count("."))
    return text if Version.parse(text) not in {None, Version(0, 0, 0)} else _NO_VERSION


def _issues(front: JsonObject, stem: str) -> Iterator[Issue]:
    name, compatibility = as_text(front.get("name")), as_text(front.get("compatibility"))
    if name and name != stem:
        fix = f"Write `name: {stem}`, or rename the folder to {name[:_NAME_LENGTH]!r}."
        yield Issue(
            "name", f"{name!r:.80} is not the name of its folder, {stem!r}, by which it is found", fix, "warning"
        )
    if len(name) > _NAME_LENGTH:
        yield Issue("name", f"is longer than {_NAME_LENGTH} characters", "Choose a shorter one.", "warning")
    if not as_text(front.get("description")).strip():
        fix = "Say in the front matter what it does and when to use it: models choose by that."
        yield Issue("description", "is missing", fix, "warning")
    if len(as_text(front.get("description"))) > _DESCRIPTION_LENGTH:
        yield Issue("description", f"is longer than {_DESCRIPTION_LENGTH:,} characters", "Shorten it.", "warning")
    if len(compatibility) > _COMPATIBILITY_LENGTH:
        yield Issue("compatibility", f"is longer than {_COMPATIBILITY_LENGTH} characters", "Shorten it.", "warning")
