"""Model providers as they are written in the config of a runtime: both forms, read into one, and their issues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from msgspec import Struct

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.manifest.names import did_you_mean, use_one_of

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
