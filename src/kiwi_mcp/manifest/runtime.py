"""The config of a runtime: how programs start, get parameters and return results; its packages and model providers."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct, ValidationError, convert, field

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_data, refuse
from kiwi_mcp.manifest.formats import Requirement, is_variable
from kiwi_mcp.manifest.names import did_you_mean, use_one_of

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
    engines: tuple[str, ...] = ()
    """The container engines of which one is started, for the runtime that runs images."""


def runtime_config(runtime: Tool) -> RuntimeConfig:
    """Return the words of a runtime, old spellings included."""
    config = runtime.manifest.config
    old_command, old_environment = _old_interpreter(as_object(runtime.manifest.env_config.get("interpreter")))
    compiled = split_words(config.get("compile_command"))
    old = as_object(runtime.manifest.env_config.get("env"))
    static = {name: value for name, value in old.items() if isinstance(value, str) and not _VARIABLE.search(value)}
    command = _command(config, old_command, is_compiled=bool(compiled))
    check = split_words(config.get("check"))
    try:
        manager = packages_of(config, old_environment, runtime.id)
    except ValidationError as error:
        fix = "Write it as `kiwi help runtimes` shows."
        raise refuse(f"{runtime.id!r}", str(error), fix, place="config.packages") from error
    env = {**static, **declared_env(runtime)}
    engines = texts(config.get("engines"))
    if engines and not runtime.origin.is_built_in:  # engines start with the rights of the owner
        fix = "Let the tool run on `container_runtime`."
        raise refuse(f"{runtime.id!r}", "only a runtime that ships with Kiwi starts containers", fix, place="engines")
    return RuntimeConfig(
        runtime_id=runtime.id,
        command=command,
        compile=compiled,
        check=check,
        params_as=as_text(config.get("params_as")) or "flags",
        result_from=as_text(config.get("result_from")) or "stdout",
        manager=manager,
        packages=texts(config.get("default_packages")),
        env=env,
        timeout=seconds(config.get("timeout"), seconds(config.get("timeout_default"), DEFAULT_TIMEOUT)),
        shell=as_text(config.get("shell")),
        install=as_text(config.get("install")),
        engines=engines,
    )


def container_config(tool: Tool) -> JsonObject:
    """Return the config of a tool that a container engine runs: only its own type keeps options from the engine."""
    if tool.manifest.tool_type != "container":
        fix = "Choose another runtime, or the type `container`."
        raise refuse(f"{tool.id!r}", "only the type `container` runs in containers", fix, place="executor")
    return tool.manifest.config


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


def _old_interpreter(interpreter: JsonObject) -> tuple[str, str]:
    kind, manager = as_text(interpreter.get("type")), as_text(interpreter.get("manager"))
    if kind == "version_manager":
        return as_text(interpreter.get("plugin")) or _MANAGED_COMMANDS.get(manager, ""), ""
    return _OLD_INTERPRETERS.get(kind, (as_text(interpreter.get("binary")), ""))


def declared_env(link: Tool) -> Mapping[str, str]:
    """Return the variables a link sets for its process, as templates; those it only names come as they are."""
    config = link.manifest.config
    env = {name: f"${{{name}}}" for name in texts(config.get("variables"))}
    env |= {name: text_of(value) for name, value in as_object(config.get("env")).items()}
    reason, fix = "loaders, interpreters or Kiwi itself obey this variable", "Give it a name of the tool's own."
    if issues := [Issue(f"config.env.{name}", reason, fix) for name in env if not is_variable(name)]:
        raise InvalidManifest(f"{link.id!r}", issues)
    return env


SHIPPED = ("python", "node")


class PackageList(Struct, frozen=True, forbid_unknown_fields=True, rename={"form": "as"}):
    """The file in which a tool lists its packages: one on each line, or a JSON object of names and versions."""

    file: str
    form: Literal["lines", "json"]
    at: str = ""
    """The key of that JSON object."""


class PackageLock(Struct, frozen=True, forbid_unknown_fields=True, rename={"form": "as"}):
    """The file with the exact versions and hashes of packages."""

    file: str
    form: Literal["lines", "npm"]
    row: str = ""
    """A pattern that every line must match; its first group is the name of the package."""
    renew: str = ""
    """The command that writes the file anew, for messages."""


class InstallTry(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to run a command: with more arguments, without a network, or with leave to build packages."""

    args: tuple[str, ...] = ()
    offline: bool = False
    builds: bool = False
    """Whether code of packages runs, apart from the cache of others then."""


class PackageIndex(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the owner says where packages are fetched from."""

    variables: tuple[str, ...] = ()
    settings: Literal["", "uv", "npm"] = ""
    """The program with settings, in variables and files, that count."""


class PackageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How packages are installed.

    Commands may name `{folder}`, `{lock}`, `{requirements}`, `{python}`, `{packages}` and `{index}`; `env` may name
    `{folder}` and `{cache}`.
    """

    requirement: Requirement
    install: tuple[str, ...]
    listed_in: PackageList | None = None
    lock: PackageLock | None = None
    uses_python: bool = False
    """Whether the environment is based on the Python below Kiwi."""
    create: tuple[str, ...] = ()
    resolve: tuple[str, ...] = ()
    """The command that writes the lock."""
    tries: tuple[InstallTry, ...] = (InstallTry(),)
    """How `resolve` and `install` are tried, until one succeeds."""
    build_if: str = ""
    """A pattern of the error after which packages are built; without it they never are."""
    env: Mapping[str, str] = {}
    bin: str = ""
    programs: Mapping[str, str] = {}
    """Commands that mean a program of the environment."""
    link: str = ""
    """The folder of modules that must be found beside the tool's files."""
    proof: str = ""
    """A path that exists in every environment that is whole."""
    index: PackageIndex = PackageIndex()
    hint: str = ""
    """What to install if a command is missing."""


class Packages(Struct, frozen=True):
    """The packages of one runtime: a shipped package manager by its name, or the runtime's own."""

    kind: str
    config: PackageConfig
    is_shipped: bool


@cache
def shipped_packages(name: str) -> Packages:
    """Return a package manager that ships with Kiwi, which runtimes name as their `environment`."""
    return Packages(name, convert(read_data(f"packages/{name}.yaml"), PackageConfig), is_shipped=True)


def packages_of(config: JsonObject, old_name: str = "", runtime_id: str = "") -> Packages | None:
    """Return the packages of a runtime from its config; `old_name` is from an older spelling."""
    if written := as_object(config.get("packages")):
        return Packages(runtime_id, convert(written, PackageConfig), is_shipped=False)
    name = as_text(config.get("environment"))
    if not name and (as_object(config.get("venv")).get("enabled") is True or config.get("venv") is True):
        name = "python"
    elif not name:
        name = "node" if config.get("npm_install") is True else old_name
    return shipped_packages(name) if name in SHIPPED else None


ANY_MODEL = "*"
"""The key below `models` that describes all models without one of their own."""
_KEYS = frozenset({"providers", "model_tiers", "tiers", "models", "dialect"})
_ENDS = {
    "/chat/completions": "openai_chat",
    "/responses": "openai_responses",
    "/messages": "anthropic",
    "/api/chat": "ollama",
    ":streamGenerateContent": "gemini",
}
_HOSTS = {"api.anthropic.com": "anthropic", "generativelanguage.googleapis.com": "gemini"}


class ModelTier(Struct, frozen=True):
    """What a tier means: a model of a provider."""

    provider: str
    model: str


class Providers(Struct, frozen=True):
    """The providers of one runtime, by name, and its tiers."""

    by_name: Mapping[str, JsonObject]
    tiers: Mapping[str, ModelTier]
    defaults: JsonObject


def has_providers(config: JsonObject) -> bool:
    """Whether the config of an item describes model providers."""
    return not _KEYS.isdisjoint(config)


def read_providers(config: JsonObject, name: str) -> Providers:
    """Return the providers of a config; one that is written without `providers` has the name of its item."""
    listed = as_object(config.get("providers"))
    by_name = {key: as_object(value) for key, value in listed.items()} if listed else {name: config}
    only = next(iter(by_name)) if len(by_name) == 1 else ""
    written = {**as_object(config.get("model_tiers")), **as_object(config.get("tiers"))}
    words = {tier: {"model": value} if isinstance(value, str) else as_object(value) for tier, value in written.items()}
    tiers = {
        tier: ModelTier(as_text(one.get("provider")) or only, as_text(one.get("model"))) for tier, one in words.items()
    }
    return Providers(by_name, tiers, as_object(config.get("defaults")))


def dialect_of(provider: JsonObject) -> str:
    """Return the dialect of a provider: the one that it names, or the one that its URL shows; empty if neither does."""
    if named := as_text(provider.get("dialect")):
        return named
    parts = urlsplit(as_text(provider.get("url")))
    shown = (dialect for end, dialect in _ENDS.items() if parts.path.rstrip("/").endswith(end))
    return next(shown, "") or _HOSTS.get(parts.hostname or "", "")


def provider_issues(config: JsonObject) -> Iterator[Issue]:
    """Yield what is wrong with the providers and tiers of a runtime."""
    if not has_providers(config):
        return
    listed = "providers" in config
    found = read_providers(config, "")
    for name, provider in found.by_name.items():
        place = f"config.providers.{name}" if listed else "config"
        if not provider.get("url"):
            yield Issue(f"{place}.url", "is required", "Write the full URL to which requests are sent.")
        elif not dialect_of(provider):
            fix = "Add `dialect`: openai_chat, openai_responses, anthropic, gemini or ollama."
            yield Issue(f"{place}.dialect", "does not follow from the URL", fix)
    for key in ("model_tiers", "tiers"):
        for tier in as_object(config.get(key)):
            yield from _tier_issues(f"config.{key}.{tier}", found.tiers[tier], found, listed=listed)


def _tier_issues(place: str, tier: ModelTier, found: Providers, *, listed: bool) -> Iterator[Issue]:
    provider = found.by_name.get(tier.provider)
    if provider is None:
        named = f"names the provider {tier.provider!r:.80}, which is not listed"
        fix = use_one_of(tier.provider, found.by_name)
        yield Issue(f"{place}.provider" if listed else place, named if tier.provider else "has no provider", fix)
        return
    models = as_object(provider.get("models"))
    if not tier.model:
        yield Issue(place, "names no model", "Write the name of a model.")
    elif models and tier.model not in models and ANY_MODEL not in models:
        fix = f"{did_you_mean(tier.model, models)}Add it below `models`, or use one of: {', '.join(list(models)[:20])}."
        yield Issue(place, f"names the model {tier.model!r:.80}, which is not listed", fix)
