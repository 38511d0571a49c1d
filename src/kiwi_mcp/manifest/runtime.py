"""The words of a runtime, read once into one shape: how programs are started, fed and heard."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from msgspec import Struct, ValidationError, field

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import refuse
from kiwi_mcp.manifest.formats import is_variable
from kiwi_mcp.manifest.packages import Packages, packages_of

DEFAULT_TIMEOUT = 300.0
_VARIABLE = lazy_pattern(r"\$\{[A-Za-z_][A-Za-z0-9_]*(?::-([^}]*))?\}")
_OLD_INTERPRETERS: Mapping[str, tuple[str, str]] = {
    "venv_python": ("python3", "python"),
    "node_modules": ("node", "node"),
}
"""Old `env_config` interpreter types: the command and the environment each one meant."""
_MANAGED_COMMANDS = {"rbenv": "ruby", "nvm": "node", "pyenv": "python3"}


class RuntimeConfig(Struct, frozen=True):
    """What a runtime says about the programs it runs."""

    runtime_id: str
    command: tuple[str, ...]
    """The program and its arguments, as templates; empty where the tool is compiled and run by itself."""
    compile: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    params_as: str = "flags"
    result_from: str = "stdout"
    manager: Packages | None = None
    packages: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float = DEFAULT_TIMEOUT
    shell: str = ""
    """Where the program also may be, if it is not on the PATH."""
    install: str = ""

    @property
    def is_compiled(self) -> bool:
        """Whether a tool is built before it runs."""
        return bool(self.compile)


def runtime_config(runtime: Tool) -> RuntimeConfig:
    """Return the words of a runtime, old spellings included."""
    config = runtime.manifest.config
    old_command, old_environment = _old_interpreter(as_object(runtime.manifest.env_config.get("interpreter")))
    compiled = split_words(config.get("compile_command"))
    return RuntimeConfig(
        runtime_id=runtime.id,
        command=_command(config, old_command, is_compiled=bool(compiled)),
        compile=compiled,
        check=split_words(config.get("check")),
        params_as=as_text(config.get("params_as")) or "flags",
        result_from=as_text(config.get("result_from")) or "stdout",
        manager=_manager(runtime, old_environment),
        packages=texts(config.get("default_packages")),
        env=_env(runtime),
        timeout=seconds(config.get("timeout"), seconds(config.get("timeout_default"), DEFAULT_TIMEOUT)),
        shell=as_text(config.get("shell")),
        install=as_text(config.get("install")),
    )


def split_words(value: Json) -> tuple[str, ...]:
    """Return a command as its words: a list as it is, a line split as a shell would, without a shell."""
    if not isinstance(value, str):
        return texts(value)
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        reason = f"{value!r} cannot be split into words ({error})"
        raise refuse("The runtime", reason, "Write the command as a list.", place="config") from error


def texts(value: Json) -> tuple[str, ...]:
    """Return the items of a list as texts."""
    return tuple(text_of(item) for item in as_list(value))


def seconds(value: Json, default: float) -> float:
    """Return a time limit, or the default where none is written."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return default
    return float(value)


def _command(config: JsonObject, old_command: str, *, is_compiled: bool) -> tuple[str, ...]:
    if run := split_words(config.get("run_command")):
        return run
    if is_compiled:
        return ("./{binary}",)
    written = as_text(config.get("command"))
    if whole := _VARIABLE.fullmatch(written):
        # Old runtimes name their interpreter by a variable: `${PROJECT_VENV_PYTHON:-python3}`.
        written = old_command or whole[1] or ""
    program = written or old_command
    return (program, *texts(config.get("args"))) if program else ()


def _manager(runtime: Tool, old_name: str) -> Packages | None:
    try:
        return packages_of(runtime.manifest.config, old_name, runtime.id)
    except ValidationError as error:
        fix = "Write it as `kiwi help runtimes` shows."
        raise refuse(f"{runtime.id!r}", str(error), fix, place="config.packages") from error


def _old_interpreter(interpreter: JsonObject) -> tuple[str, str]:
    kind = as_text(interpreter.get("type"))
    if kind in _OLD_INTERPRETERS:
        return _OLD_INTERPRETERS[kind]
    if kind == "version_manager":
        manager = as_text(interpreter.get("manager"))
        return as_text(interpreter.get("plugin")) or _MANAGED_COMMANDS.get(manager, ""), ""
    return as_text(interpreter.get("binary")), ""


def _env(runtime: Tool) -> Mapping[str, str]:
    old = as_object(runtime.manifest.env_config.get("env"))
    static = {name: value for name, value in old.items() if isinstance(value, str) and not _VARIABLE.search(value)}
    return {**static, **declared_env(runtime)}


def declared_env(link: Tool) -> Mapping[str, str]:
    """Return the variables a link sets for its process, as templates; those it only names come as they are."""
    config = link.manifest.config
    named = {name: f"${{{name}}}" for name in texts(config.get("variables"))}
    written = {name: text_of(value) for name, value in as_object(config.get("env")).items()}
    _refuse_obeyed(link, {**named, **written})
    return {**named, **written}


def _refuse_obeyed(link: Tool, env: Mapping[str, str]) -> None:
    fix = "Give it a name of the tool's own."
    issues = [
        Issue(f"config.env.{name}", "loaders, interpreters or Kiwi itself obey this variable", fix)
        for name in env
        if not is_variable(name)
    ]
    if issues:
        raise InvalidManifest(f"{link.id!r}", issues)
