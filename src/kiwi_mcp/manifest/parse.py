"""A mapping as an author wrote it, in any spelling Kiwi has ever had, to the one manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import CHECKPOINT_MODES, Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.names import is_safe_path
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import join, line_of
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.parameters import FORMATS, is_old_form, to_schema
from kiwi_mcp.manifest.type_specs import TypeSpec, TypeSpecs, load_type_specs

PARAMETER_WORDS = ("parameters", "input_schema", "inputs", "config_schema")
"""Where parameters may be declared; the first one present counts."""
WORDS = {
    "tool_id", "tool_type", "version", "executor", "executor_id", "name", "description", "category", "tags", "config",
    "outputs", "output_schema", "requires", "dependencies", "mutates_state", "effect", "validation",
    "child_constraints", "env_config", "entrypoint", *PARAMETER_WORDS,
}  # fmt: skip
METADATA = {
    "author", "authors", "created_at", "updated_at", "capabilities", "license", "homepage", "repository", "subcategory",
    "namespace", "visibility", "changelog", "isolation", "examples", "deprecated", "annotations", "title", "extensions",
    "system_only", "scope_required", "signature", "documentation", "icon", "is_official", "is_builtin", "task",
    "mime_type", "checkpoint", "needs", "probe",
}  # fmt: skip
"""Words that belong to no type, and are kept as they were written."""

_PERMISSION = lazy_pattern(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_SECRET_WORD = {"bearer": "token", "basic": "password"}


class _Reading(Struct):
    """The manifest while it is being read."""

    written: JsonObject
    sheets: TypeSpecs
    lines: Mapping[str, int]
    issues: list[Issue] = field(default_factory=list)

    def fault(self, place: str, reason: str, fix: str) -> None:
        self.issues.append(Issue(place, reason, fix, line=self.lines.get(place)))

    def warn(self, place: str, reason: str, fix: str) -> None:
        self.issues.append(Issue(place, reason, fix, "warning", self.lines.get(place)))

    def text(self, word: str) -> str:
        """Return the text of a word; a number is the text it was written as."""
        match self.written.get(word):
            case None:
                return ""
            case str() as text:
                return text
            case bool() | Mapping() | list():
                self.fault(word, "is not text", "Write text.")
                return ""
            case other:
                return text_of(other)

    def object(self, word: str) -> JsonObject:
        """Return the mapping of a word; nothing written is an empty one."""
        value = self.written.get(word)
        if value is not None and not isinstance(value, Mapping):
            self.fault(word, "is not a mapping", "Write `key: value` pairs.")
        return as_object(value)


def parse(
    written: JsonObject,
    *,
    stem: str,
    category: str = "",
    lines: Mapping[str, int] | None = None,
    sheets: TypeSpecs | None = None,
) -> Manifest:
    """Return the manifest of a mapping; its faults are in its `issues`."""
    reading = _Reading(written, sheets or load_type_specs(), lines or {})
    tool_type, executor, config = _kind(reading)
    sheet = reading.sheets.get(tool_type)
    packages, permissions = _needs(reading, config)
    entrypoint = reading.text("entrypoint")
    if entrypoint and "entrypoint" not in config and (sheet is None or "entrypoint" in sheet.words):
        config = {**config, "entrypoint": entrypoint}
    config = _config(config, sheet, packages)
    if "cache_dir" in as_object(config.get("venv")):
        reason = "is not used: environments are in the cache of this machine"
        reading.warn("config.venv.cache_dir", reason, "Leave it out; `XDG_CACHE_HOME` moves the cache.")
    parameters, outputs = _parameters(reading), _outputs(reading)
    _check_checkpoint(reading)
    _report_unknown(reading, sheet)
    return Manifest(
        tool_id=reading.text("tool_id") or reading.text("name") or stem,
        tool_type=tool_type,
        version=reading.text("version"),
        executor=executor,
        name=reading.text("name"),
        description=reading.text("description").strip(),
        category=_category(reading, category),
        tags=_tags(reading),
        config=config,
        parameters=parameters,
        outputs=outputs,
        requires=permissions,
        mutates_state=_mutates_state(reading),
        effect=reading.text("effect") or (sheet.effect if sheet else ""),
        result_kind=sheet.traits.result_kind if sheet else "data",
        validation=_validation(reading),
        env_config=reading.object("env_config"),
        extra={word: value for word, value in written.items() if word not in WORDS},
        written=written,
        issues=tuple(reading.issues),
    )


def _kind(reading: _Reading) -> tuple[str, str | None, JsonObject]:
    """Return the type, the executor and the config, under any of their accepted names."""
    config = reading.object("config")
    executor = reading.written.get("executor_id", reading.written.get("executor"))
    tool_type, implied = reading.sheets.canonical(reading.text("tool_type"))
    match executor:
        case Mapping():
            # The first form of manifests: the executor's own words stand below it, with its type.
            word = as_text(executor.get("type")) or tool_type
            meant, own = reading.sheets.canonical(word)
            sheet = reading.sheets.get(meant)
            implied = own or implied or (sheet.default_executor if sheet else "")
            inner = {key: value for key, value in executor.items() if key != "type"}
            return tool_type or meant, implied or None, {**inner, **config}
        case str():
            return tool_type, executor or None, config
        case None:
            return tool_type, implied or None, config
        case _:
            reading.fault("executor", "is not the name of an item", "Write the executor's tool_id.")
            return tool_type, implied or None, config


def _needs(reading: _Reading, config: JsonObject) -> tuple[list[Json], tuple[str, ...]]:
    """Return the packages and the permissions an item asks for; both were called `requires` at some time."""
    asked = as_list(reading.written.get("requires"))
    permissions = [item for item in asked if isinstance(item, str) and _PERMISSION.fullmatch(item)]
    packages = [item for item in asked if item not in permissions]
    for source in (reading.written.get("dependencies"), config.get("dependencies")):
        packages += [_package(item) for item in as_list(source)]
    return packages, tuple(permissions)


def _package(item: Json) -> Json:
    match item:
        case {"name": str() as name, "version": str() as version}:
            return f"{name}{version}" if version[:1] in "<>=!~^@" else f"{name}=={version}"
        case {"name": str() as name}:
            return name
        case _:
            return item


def _config(config: JsonObject, sheet: TypeSpec | None, packages: Sequence[Json]) -> JsonObject:
    settled = {word: value for word, value in config.items() if word != "dependencies"}
    match settled.get("requires"):
        case Mapping() as needs:
            # The first form named commands, variables and packages below one word.
            settled.pop("requires")
            packages = [*as_list(needs.get("packages")), *packages]
            for word, target in (("commands", "commands"), ("environment", "variables")):
                if word in needs:
                    settled.setdefault(target, needs[word])
        case str() | bool() | int() | float():
            return settled
        case listed:
            packages = [*(_package(item) for item in as_list(listed)), *packages]
    if packages or "requires" in settled:
        settled.pop("requires", None)
        words = sheet.words if sheet else ("requires",)
        word = "default_packages" if "requires" not in words and "default_packages" in words else "requires"
        settled[word] = list({text_of(item): item for item in packages}.values())
    if "endpoint" in settled and "url" not in settled:
        settled["url"] = settled.pop("endpoint")
    auth = as_object(settled.get("auth"))
    if isinstance(variable := auth.get("env_var"), str):
        word = _SECRET_WORD.get(as_text(auth.get("type")), "key")
        settled["auth"] = {word: f"${{{variable}}}", **{key: value for key, value in auth.items() if key != "env_var"}}
    return settled


def _parameters(reading: _Reading) -> JsonObject:
    word = next((word for word in PARAMETER_WORDS if reading.written.get(word) is not None), "parameters")
    schema, issues = to_schema(reading.written.get(word), word)
    reading.issues += [replace(issue, line=line_of(issue.place, reading.lines)) for issue in issues]
    return schema


def _outputs(reading: _Reading) -> JsonObject:
    value = reading.written.get("outputs", reading.written.get("output_schema"))
    if isinstance(value, str | bool | int | float):
        reading.fault("outputs", "is not a schema", "Write a JSON Schema, or `format` and `schema`.")
    if not (listed := [as_object(item) for item in as_list(value)]):
        outputs = as_object(value)
        if is_old_form(outputs) and outputs["format"] not in FORMATS:
            reading.fault("outputs.format", f"{outputs['format']!r} is not json, text or file", "Write one of them.")
        return outputs
    named = {as_text(one.get("name")): {word: inner for word, inner in one.items() if word != "name"} for one in listed}
    return {"type": "object", "properties": named}


def _category(reading: _Reading, folder: str) -> str:
    written = reading.text("category")
    if written and folder and written != folder:
        reason = f"says {written!r}, and the file is in the folder {folder!r}"
        reading.warn("category", reason, f"Write `category: {folder}`, or move the file.")
    return folder or written


def _tags(reading: _Reading) -> tuple[str, ...]:
    value = reading.written.get("tags")
    listed: Sequence[Json] = [part.strip() for part in value.split(",")] if isinstance(value, str) else as_list(value)
    if value is not None and (not all(isinstance(tag, str) for tag in listed) or (not listed and value != [])):
        reading.fault("tags", "is not a list of texts", "Write `tags: [one, two]`.")
    return tuple(tag for tag in listed if isinstance(tag, str) and tag)


def _mutates_state(reading: _Reading) -> bool:
    value = reading.written.get("mutates_state", False)
    if not isinstance(value, bool):
        reading.fault("mutates_state", f"{value!r} is not true or false", "Write `true` or `false`.")
    return value is True


def _check_checkpoint(reading: _Reading) -> None:
    written = reading.written.get("checkpoint")
    words = as_object(written)
    if written is None or written in CHECKPOINT_MODES:
        return
    if not words or words.get("mode", "explicit") not in CHECKPOINT_MODES or words.keys() - {"mode", "paths"}:
        fix = f"Write one of {', '.join(CHECKPOINT_MODES)}, or `{{mode: auto, paths: [folder]}}`."
        reading.fault("checkpoint", "is not a mode of checkpoints", fix)
    paths = words.get("paths", [])
    if not isinstance(paths, list) or not all(isinstance(path, str) and is_safe_path(path) for path in paths):
        reading.fault("checkpoint.paths", "is not a list of paths below the project", "Write `paths: [folder, file]`.")


def _validation(reading: _Reading) -> JsonObject:
    validation = reading.object("validation")
    constraints = reading.object("child_constraints")
    return {"child_constraints": constraints, **validation} if constraints else validation


def _report_unknown(reading: _Reading, sheet: TypeSpec | None) -> None:
    below = sheet.words if sheet else ()
    for word in reading.written:
        if word in WORDS or word in METADATA:
            continue
        if word in below:
            reading.fault(word, f"`{word}` belongs under `config`", f"Write it as `{join('config', word)}`.")
        else:
            fix = did_you_mean(word, WORDS | METADATA).strip() or "Remove it."
            reading.warn(word, f"unknown key {word!r}; it is kept and has no effect", fix)
