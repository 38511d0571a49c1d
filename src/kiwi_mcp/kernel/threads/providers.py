"""The provider of a thread where nothing names one: the only one that is configured and has its key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.data import FOLDER
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, ProviderNotChosen
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.drivers.llm.provider import choose_model
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.runtime import has_providers, read_providers
from kiwi_mcp.manifest.templates import defaulted, variables
from kiwi_mcp.policy.secret_access import missing_names

_PRESETS = FOLDER / "tools" / "providers"


def only_provider(default: Chain, catalog: Catalog, *, tier: str = "") -> Chain:
    """Return the owner's only provider, or the only one of several that has its key; else the only preset with a key.

    `default` is the built-in runtime of threads. It is used where the key of its own model is set.
    """
    space = catalog.space
    own = {name: missing_of(config, space) for name, config in _configs(space.user / "providers", space.user / "tools")}
    if len(own) == 1:
        return catalog.resolve(next(iter(own)))
    if own:
        usable = [name for name, missing in own.items() if not missing]
    else:
        choice = choose_model(default, tier=tier)
        needed = _names({"auth": choice.auth, "url": choice.url, "headers": dict(choice.headers)})
        presets = {name: config for name, config in _configs(_PRESETS) if _names(config)}
        usable = [name for name, config in presets.items() if not missing_of(config, space)]
        if not missing_names(needed, space):
            usable = [default.tool.id, *(name for name in usable if {*_names(presets[name])} != {*needed})]
    if len(usable) == 1:
        return catalog.resolve(usable[0])
    raise ProviderNotChosen(
        [f"{name} (needs {', '.join(missing)})" if missing else name for name, missing in own.items()] or usable,
        presets=[f"{name} ({', '.join(_names(config)) or 'local'})" for name, config in _configs(_PRESETS)],
    )


def unknown_provider(name: str) -> InvalidManifest:
    """Return the error of a `provider_adapter` that is no item."""
    fix = "Name one that is here: `kiwi search 'model provider' --source all` lists them."
    return InvalidManifest("The owner's config.yaml", [Issue("provider_adapter", f"{name!r} is not here", fix)])


def missing_of(config: JsonObject, space: Space) -> Sequence[str]:
    """Return the variables without a value that a provider needs; of several providers, the one that lacks least."""
    found = [missing_names(_names(one), space) for one in read_providers(config, "").by_name.values()]
    return min(found, key=len, default=())


def _names(provider: JsonObject) -> tuple[str, ...]:
    sent: list[Json] = [provider.get(key) for key in ("url", "auth", "headers")]
    spare = defaulted(sent)
    return tuple(name for name in variables(sent) if name not in spare)


def _configs(*folders: Path) -> Iterator[tuple[str, JsonObject]]:
    """Yield the providers that the files of some folders describe."""
    for path in (path for folder in folders for path in sorted(folder.glob("*.yaml"))):
        with suppress(KiwiError, OSError, UnicodeError):  # a file that cannot be read is reported where it is used
            manifest = as_object(read_yaml(path.read_text(encoding="utf-8"), what=path.name).value)
            config = as_object(manifest.get("config"))
            if not path.name.startswith(".") and has_providers(config):
                yield as_text(manifest.get("tool_id")), config
