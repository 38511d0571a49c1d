"""The model of a thread, chosen by name or by tier from the providers of a runtime; its price and its context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlsplit

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.messages import TokenUsage
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.runtime import ANY_MODEL, ModelTier, Providers, dialect_of, has_providers, read_providers

DEFAULT_TIER = "balanced"
_DEFAULT_OUTPUT = 4_096
_MILLION = 1_000_000
_KEY_HEADERS = {"anthropic": "x-api-key", "gemini": "x-goog-api-key"}
"""Headers that hold the key alone, without `Bearer`, by dialect."""
_ENDPOINTS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "ollama": "/api/chat",
    "gemini": "/v1beta/models/{model}:streamGenerateContent",
}


class ModelPrice(Struct, frozen=True):
    """A price in millionths of a US dollar for a million tokens of each class."""

    input: int
    output: int
    cache_read: int
    cache_write: int


class ModelChoice(Struct, frozen=True):
    """One model of one provider, and how it is asked. It holds names of variables, never their values."""

    provider: str
    dialect: str
    model: str
    url: str
    auth_header: str = "authorization"
    auth: str = ""
    """The value of the header as a template, such as `Bearer ${OPENAI_API_KEY}`; empty for a server without keys."""
    headers: Mapping[str, str] = {}
    context: int = 0
    """The context window in tokens; 0 where it is not declared, `prices.context_window` looks it up."""
    max_output: int = _DEFAULT_OUTPUT
    """The most that the model can answer, in tokens."""
    temperature: float | None = None
    default_max_tokens: int = _DEFAULT_OUTPUT
    price: ModelPrice | None = None
    """What the owner declared; None if the price has to be looked up."""
    cap_field: str = ""
    quirks: frozenset[str] = frozenset()
    tools_mode: Literal["frozen", "grow"] = "frozen"
    requests_per_minute: int = 0
    """The most requests that the provider gets in a minute; 0 sets no limit."""


def choose_model(chain: Chain, *, tier: str = "", model: str = "") -> ModelChoice:
    """Return the model that a thread uses; a model, written as `name` or `provider/name`, wins over the tier."""
    for link in chain.links:
        if has_providers(link.manifest.config):
            found = read_providers(link.manifest.config, link.id)
            return _choice(_named(model, tier, found) if model else _tier(tier or DEFAULT_TIER, found), found)
    raise InvalidRequest(
        f"{chain.executor.id!r} describes no provider of models.",
        suggestion="Set `executor` to `llm_runtime` or to a runtime with `dialect`, `url` and `models` in its config.",
    )


def _tier(tier: str, found: Providers) -> ModelTier:
    if tier in found.tiers:
        return found.tiers[tier]
    if not found.tiers and (models := [*_models(found)]):
        return models[0]
    raise InvalidRequest(
        f"There is no model tier {tier!r:.80}.",
        suggestion=f"{did_you_mean(tier, found.tiers)}Use one of: {', '.join(found.tiers) or 'none is declared'}; "
        "or name a `model`.",
    )


def _models(found: Providers) -> Iterable[ModelTier]:
    for name, provider in found.by_name.items():
        yield from (ModelTier(name, model) for model in as_object(provider.get("models")) if model != ANY_MODEL)


def _named(model: str, tier: str, found: Providers) -> ModelTier:
    """Return the model of a name: by its provider, by the lists of models, by the tiers, or of the only provider."""
    provider, slash, name = model.partition("/")
    if slash and provider in found.by_name:
        return ModelTier(provider, name)
    known = [*_models(found), *found.tiers.values()]
    if hit := next((one for one in known if one.model == model), None):
        return hit
    if len(found.by_name) == 1:
        return ModelTier(next(iter(found.by_name)), model)
    if tier in found.tiers and not slash:
        near = did_you_mean(model, (one.model for one in known))
    else:
        near = did_you_mean(provider, found.by_name) if slash else did_you_mean(model, (one.model for one in known))
    raise InvalidRequest(
        f"It is not known which provider has the model {model!r:.80}.",
        suggestion=f"{near}Write `provider/model`, with one of these providers: {', '.join(found.by_name)}.",
    )


def _choice(named: ModelTier, found: Providers) -> ModelChoice:
    provider = found.by_name.get(named.provider)
    if provider is None:
        raise InvalidRequest(
            f"There is no provider {named.provider!r:.80}.",
            suggestion=f"{did_you_mean(named.provider, found.by_name)}Use one of: {', '.join(found.by_name)}.",
        )
    models = as_object(provider.get("models"))
    if models and named.model not in models and ANY_MODEL not in models:
        raise InvalidRequest(
            f"The provider {named.provider!r} lists no model {named.model!r:.80}.",
            suggestion=f"{did_you_mean(named.model, models)}Add it below `models` with its `context` and `max_output`, "
            f"or use one of: {', '.join(list(models)[:20])}.",
        )
    declared, dialect = as_object(models.get(named.model, models.get(ANY_MODEL))), dialect_of(provider)
    if dialect not in _ENDPOINTS:
        raise InvalidRequest(
            f"The provider {named.provider!r} has no known dialect: {dialect!r:.40}.",
            suggestion=f"{did_you_mean(dialect, _ENDPOINTS)}Set `dialect` to one of: {', '.join(_ENDPOINTS)}.",
        )
    wanted = _whole(found.defaults.get("max_tokens"))
    max_output = _whole(declared.get("max_output")) or wanted or _DEFAULT_OUTPUT
    header, auth = _auth(provider, dialect)
    return ModelChoice(
        provider=named.provider,
        dialect=dialect,
        model=named.model,
        url=_url(as_text(provider.get("url")), dialect, named.model),
        auth_header=header,
        auth=auth,
        headers={name.lower(): as_text(value) for name, value in as_object(provider.get("headers")).items()},
        context=_whole(declared.get("context")),
        max_output=max_output,
        temperature=_number(declared.get("temperature", found.defaults.get("temperature"))),
        default_max_tokens=min(wanted or _DEFAULT_OUTPUT, max_output),
        price=_price(named.model, declared, as_object(provider.get("prices"))),
        cap_field=as_text(provider.get("cap_field")) or "max_completion_tokens",
        quirks=frozenset(map(as_text, (*as_list(provider.get("quirks")), *as_list(declared.get("quirks"))))),
        tools_mode="grow" if provider.get("tools") == "grow" else "frozen",
        requests_per_minute=_whole(provider.get("requests_per_minute")),
    )


def _url(written: str, dialect: str, model: str) -> str:
    """Return the address of requests; one that ends with its version or its host is completed."""
    parts = urlsplit(written)
    path, end = parts.path.rstrip("/"), _ENDPOINTS[dialect]
    root = end.partition("/models")[0] if "{model}" in end else end.rpartition("/")[0].removesuffix("/chat")
    if not path:
        path = end
    elif path == root or (path.endswith(root) and dialect != "ollama"):
        path += end.removeprefix(root)
    query = parts.query or ("alt=sse" if dialect == "gemini" else "")
    return parts._replace(path=path.replace("{model}", quote(model, safe="")), query=query).geturl()


def _auth(provider: JsonObject, dialect: str) -> tuple[str, str]:
    auth, header = as_text(provider.get("auth")), as_text(provider.get("auth_header")).lower()
    if header or not auth:
        return header or "authorization", auth
    scheme, _, key = auth.rpartition(" ")
    if dialect in _KEY_HEADERS:
        return _KEY_HEADERS[dialect], key if scheme.lower() == "bearer" else auth
    return "authorization", auth if scheme else f"Bearer {auth}"


def _price(model: str, declared: JsonObject, prices: JsonObject) -> ModelPrice | None:
    """Return the declared price: that of the model, then of the longest name that it begins with, then `default`."""
    keys = [key for key in sorted(prices, key=len, reverse=True) if key != "default" and model.startswith(key)]
    written = declared.get("price") or prices.get(model) or next((prices[key] for key in keys), prices.get("default"))
    if written == "free":
        return ModelPrice(0, 0, 0, 0)
    listed = as_object(written)
    if not listed:
        return None
    given = listed.get("input", listed.get("input_per_million"))
    return ModelPrice(
        _micros(given),
        _micros(listed.get("output", listed.get("output_per_million"))),
        _micros(listed.get("cache_read", given)),
        _micros(listed.get("cache_write", given)),
    )


def _micros(dollars: Json) -> int:
    return round((_number(dollars) or 0.0) * _MILLION)


def _number(value: Json) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: Json) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, PriceCalculation


def cost_micros(usage: TokenUsage, choice: ModelChoice) -> int | None:
    """Return the cost of a reply; None if the price of its model is not known."""
    if choice.price is not None:
        total = (
            usage.input * choice.price.input
            + usage.output * choice.price.output
            + usage.cache_read * choice.price.cache_read
            + usage.cache_write * choice.price.cache_write
        )
        return -(-total // _MILLION)
    found = _looked_up(usage, choice)
    return None if found is None else int((found.total_price * _MILLION).to_integral_value(ROUND_CEILING))


def worst_case_micros(input_tokens: int, max_output: int, choice: ModelChoice) -> int | None:
    """Return the most that a request can cost: all its input at the dearest price, and all the output it may have."""
    cases = (TokenUsage(input=input_tokens, output=max_output), TokenUsage(cache_write=input_tokens, output=max_output))
    costs = [cost for usage in cases if (cost := cost_micros(usage, choice)) is not None]
    return max(costs, default=None)


def price_source(choice: ModelChoice) -> str:
    """Return where the price of a model comes from: the owner's file of the provider, or the table."""
    return "genai-prices" if choice.price is None else "owner"


def context_window(choice: ModelChoice) -> int | None:
    """Return the size of a model's context in tokens, as declared or as the table has it; None if it is not known."""
    if choice.context:
        return choice.context
    found = _looked_up(TokenUsage(input=1), choice)
    model: ModelInfo | None = found.model if found else None
    return model.context_window if model else None


def _looked_up(usage: TokenUsage, choice: ModelChoice) -> PriceCalculation | None:
    # The table takes a third of a second to import, and a thread on a local model never needs it.
    from genai_prices import Usage, calc_price  # noqa: PLC0415 - see above

    counted = Usage(
        input_tokens=usage.input + usage.cache_read + usage.cache_write,
        cache_read_tokens=usage.cache_read,
        cache_write_tokens=usage.cache_write,
        output_tokens=usage.output,
    )
    try:
        return calc_price(counted, choice.model, provider_api_url=choice.url)
    except LookupError:
        return None
