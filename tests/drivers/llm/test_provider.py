"""Providers as data: both forms, tiers and names of models, headers, prices and their issues."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tests.drivers.llm.conftest import chain_of

from kiwi_mcp.data import FOLDER
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import TokenUsage
from kiwi_mcp.drivers.llm.dialects import DIALECTS
from kiwi_mcp.drivers.llm.provider import (
    ModelChoice,
    ModelPrice,
    choose_model,
    context_window,
    cost_micros,
    worst_case_micros,
)
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.runtime import provider_issues
from kiwi_mcp.manifest.type_specs import load_type_specs

SEED: JsonObject = yaml.safe_load((FOLDER / "tools" / "runtimes" / "llm_runtime.yaml").read_text())["config"]
LOCAL: JsonObject = {
    "dialect": "openai_chat",
    "url": "http://127.0.0.1:11434/v1/chat/completions",
    "models": {"qwen3": {"context": 32768, "max_output": 4096, "price": "free"}},
    "tiers": {"fast": "qwen3"},
    "cap_field": "max_tokens",
}


def issues(config: JsonObject) -> list[str]:
    manifest = Manifest("local_llm", "runtime", "1.0.0", executor="http_client", description="x", config=config)
    return [f"{issue.place}: {issue.reason}" for issue in check(manifest, sheets=load_type_specs())]


@pytest.mark.req("K-TH-01", "N7")
def test_the_runtime_of_the_seed_works_as_printed() -> None:
    choice = choose_model(chain_of(SEED), tier="fast")

    assert (choice.provider, choice.dialect, choice.model) == ("anthropic", "anthropic", "claude-3-haiku-20240307")
    assert choice.url == "https://api.anthropic.com/v1/messages"
    assert (choice.auth_header, choice.auth) == ("x-api-key", "${ANTHROPIC_API_KEY}")
    assert (choice.default_max_tokens, choice.temperature) == (4096, 0)
    assert issues(SEED) == []


def test_a_runtime_with_one_provider_is_read() -> None:
    choice = choose_model(chain_of(LOCAL), tier="fast")

    assert choice == ModelChoice(
        provider="local_llm",
        dialect="openai_chat",
        model="qwen3",
        url="http://127.0.0.1:11434/v1/chat/completions",
        context=32768,
        max_output=4096,
        default_max_tokens=4096,
        price=ModelPrice(0, 0, 0, 0),
        cap_field="max_tokens",
    )
    assert issues(LOCAL) == []


def test_a_model_that_is_named_wins_over_the_tier() -> None:
    by_name = choose_model(chain_of(SEED), tier="fast", model="claude-sonnet-4-20250514")
    by_provider = choose_model(chain_of(SEED), tier="fast", model="openai/gpt-5-mini")

    assert by_name.model == "claude-sonnet-4-20250514"
    assert (by_provider.provider, by_provider.dialect, by_provider.model) == ("openai", "openai_chat", "gpt-5-mini")
    assert (by_provider.auth_header, by_provider.auth) == ("authorization", "Bearer ${OPENAI_API_KEY}")
    assert choose_model(chain_of(LOCAL), tier="", model="local_llm/qwen3").model == "qwen3"


@pytest.mark.parametrize(
    ("config", "asked", "hint"),
    [
        (SEED, {"tier": "balnced"}, "Did you mean `balanced`?"),
        (SEED, {"model": "gpt-5"}, "provider/model"),
        (LOCAL, {"model": "qwen"}, "Did you mean `qwen3`?"),
        (LOCAL, {}, "Use one of: fast"),
        ({**SEED, "model_tiers": {"fast": {"provider": "antropic", "model": "m"}}}, {"tier": "fast"}, "`anthropic`"),
        ({"url": "https://a.test/x", "models": {"m": {}}}, {"model": "m"}, "dialect"),
        ({"command": "python3"}, {"tier": "fast"}, "llm_runtime"),
    ],
)
def test_what_is_not_known_is_an_error_with_a_suggestion(config: JsonObject, asked: dict[str, str], hint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        choose_model(chain_of(config), **asked)

    assert hint in caught.value.suggestion


@pytest.mark.parametrize(
    ("provider", "header", "auth"),
    [
        ({"dialect": "anthropic", "auth": "Bearer ${K}"}, "x-api-key", "${K}"),
        ({"dialect": "anthropic", "auth": "${K}"}, "x-api-key", "${K}"),
        (
            {"dialect": "anthropic", "auth": "Bearer ${K}", "auth_header": "authorization"},
            "authorization",
            "Bearer ${K}",
        ),
        ({"dialect": "gemini", "auth": "Bearer ${K}"}, "x-goog-api-key", "${K}"),
        ({"dialect": "openai_chat", "auth": "${K}"}, "authorization", "Bearer ${K}"),
        ({"dialect": "openai_chat", "auth": "${K}", "auth_header": "api-key"}, "api-key", "${K}"),
        ({"dialect": "ollama"}, "authorization", ""),
    ],
)
def test_a_key_is_sent_in_the_header_of_its_dialect(provider: JsonObject, header: str, auth: str) -> None:
    choice = choose_model(chain_of({"url": "https://a.test/v1", "models": {"m": {}}, **provider}), model="m")

    assert (choice.auth_header, choice.auth) == (header, auth)


@pytest.mark.parametrize(
    ("url", "dialect", "complete"),
    [
        ("https://a.test/v1/chat/completions", "", "https://a.test/v1/chat/completions"),
        ("https://a.test/v1", "openai_chat", "https://a.test/v1/chat/completions"),
        ("https://a.test/openai/v1/", "openai_responses", "https://a.test/openai/v1/responses"),
        ("https://a.test/v1/responses", "", "https://a.test/v1/responses"),
        ("https://a.test", "anthropic", "https://a.test/v1/messages"),
        ("http://127.0.0.1:11434/api/chat", "", "http://127.0.0.1:11434/api/chat"),
        ("http://127.0.0.1:11434", "ollama", "http://127.0.0.1:11434/api/chat"),
        ("https://a.test/v1beta", "gemini", "https://a.test/v1beta/models/m:streamGenerateContent?alt=sse"),
        (
            "https://a.test/v1beta/models/{model}:streamGenerateContent?alt=sse",
            "",
            "https://a.test/v1beta/models/m:streamGenerateContent?alt=sse",
        ),
        ("https://a.test/deployments/x/chat/completions?v=1", "", "https://a.test/deployments/x/chat/completions?v=1"),
    ],
)
def test_a_url_is_completed_and_shows_the_dialect(url: str, dialect: str, complete: str) -> None:
    config: JsonObject = {"url": url, "models": {"m": {}}, **({"dialect": dialect} if dialect else {})}

    assert issues(config) == []
    assert choose_model(chain_of(config), model="m").url == complete


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({**SEED, "model_tiers": {"fast": {"provider": "nobody", "model": "m"}}}, "config.model_tiers.fast.provider"),
        ({**LOCAL, "tiers": {"fast": "qwen4"}}, "config.tiers.fast"),
        ({"url": "https://a.test/x", "models": {"m": {}}}, "config.dialect"),
        ({"providers": {"a": {"url": "https://a.test/x"}}}, "config.providers.a.dialect"),
        ({"providers": {"a": {"url": "https://a.test/x", "key": "k"}}}, "config.providers.a"),
        ({**LOCAL, "quirks": ["odd"]}, "config.quirks[0]"),
        ({**LOCAL, "models": {"qwen3": {"context": "big"}}}, "config.models.qwen3.context"),
        ({**LOCAL, "models": {"qwen3": {"price": "cheap"}}}, "config.models.qwen3.price"),
        ({**LOCAL, "defaults": {"max_tokens": 0}}, "config.defaults.max_tokens"),
    ],
)
def test_a_wrong_provider_is_an_issue_with_its_place(config: JsonObject, place: str) -> None:
    assert any(issue.startswith(place) for issue in issues(config)), issues(config)


def test_a_server_may_have_any_model() -> None:
    config: JsonObject = {**LOCAL, "models": {"*": {"context": 8192, "max_output": 100, "price": "free"}}}

    choice = choose_model(chain_of(config), model="org/some-model:7b")

    assert issues(config) == []
    assert (choice.model, choice.context, choice.default_max_tokens) == ("org/some-model:7b", 8192, 100)


def test_runtimes_of_languages_have_no_providers() -> None:
    assert list(provider_issues({"command": "python3"})) == []


@pytest.mark.parametrize(
    ("prices", "usage", "micros"),
    [
        ({"m": {"input": 2.5, "output": 10}}, TokenUsage(input=1000, output=500), 7_500),
        ({"default": {"input": 5, "output": 15}}, TokenUsage(input=1000, output=500), 12_500),
        ({"m": {"input_per_million": 1, "output_per_million": 2}}, TokenUsage(input=1, output=1), 3),
        ({"m": {"input": 1, "output": 2, "cache_read": 0.1}}, TokenUsage(cache_read=1000, cache_write=1000), 1_100),
        ({"m": "free"}, TokenUsage(input=1000, output=500), 0),
        ({"m": {"input": 0.1, "output": 0.1}}, TokenUsage(input=1), 1),
    ],
)
def test_the_price_of_the_owner_counts(prices: JsonObject, usage: TokenUsage, micros: int) -> None:
    config: JsonObject = {"url": "https://api.openai.com/v1/responses", "prices": prices, "models": {"m": {}}}
    choice = choose_model(chain_of(config), model="m")

    assert issues(config) == []
    assert cost_micros(usage, choice) == micros


def test_the_longest_name_that_a_model_begins_with_gives_its_price() -> None:
    prices: JsonObject = {"gpt": {"input": 1, "output": 1}, "gpt-5": {"input": 2, "output": 2}, "gpt-5-x": "free"}
    config: JsonObject = {"url": "https://api.openai.com/v1/responses", "prices": prices, "models": {"gpt-5-mini": {}}}

    assert cost_micros(TokenUsage(input=1_000_000), choose_model(chain_of(config), model="gpt-5-mini")) == 2_000_000


def test_prices_are_looked_up_and_an_unknown_one_is_none() -> None:
    known = choose_model(chain_of(SEED), model="anthropic/claude-sonnet-4-5")
    unknown = choose_model(chain_of(SEED), model="anthropic/nonsense-1")
    local = ModelChoice("p", "openai_chat", "qwen3", "http://127.0.0.1:1/v1/chat/completions")

    usage = TokenUsage(input=8_000, cache_read=90_000, cache_write=2_000, output=500)
    assert cost_micros(usage, known) == 66_000
    assert worst_case_micros(1_000, 500, known) == 3_750 + 7_500
    assert context_window(known) == 200_000
    assert cost_micros(usage, unknown) is None
    assert worst_case_micros(1, 1, unknown) is None
    assert context_window(unknown) is None
    assert cost_micros(usage, local) is None


def test_a_worst_case_is_never_below_what_is_paid() -> None:
    choice = choose_model(chain_of(SEED), tier="balanced")
    worst = worst_case_micros(100_000, 4_096, choice)

    assert worst is not None
    for usage in (
        TokenUsage(input=100_000, output=4_096),
        TokenUsage(cache_write=100_000, output=4_096),
        TokenUsage(cache_read=99_000, cache_write=1_000, output=1),
    ):
        assert (cost_micros(usage, choice) or 0) <= worst


PRESETS = sorted((FOLDER / "tools" / "providers").glob("*.yaml"))


@pytest.mark.req("N7")
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_has_three_tiers_with_known_context_and_price(path: Path) -> None:
    item = yaml.safe_load(path.read_text())
    manifest = Manifest(
        item["tool_id"], "runtime", item["version"], "http_client", config=item["config"], description="x"
    )

    assert [str(issue) for issue in check(manifest, sheets=load_type_specs())] == []
    for tier in ("fast", "balanced", "powerful"):
        choice = choose_model(chain_of(item["config"], item["tool_id"]), tier=tier)
        assert choice.dialect in DIALECTS
        assert choice.context >= 8_000
        assert 1_024 <= choice.default_max_tokens <= choice.max_output <= choice.context
        assert cost_micros(TokenUsage(input=1_000, output=1_000), choice) is not None


def test_the_common_providers_have_presets() -> None:
    names = {path.stem.removesuffix("_runtime") for path in PRESETS}

    assert names == {
        "anthropic", "openai", "gemini", "openrouter", "groq", "mistral", "deepseek", "ollama", "lmstudio", "llamacpp",
        "vllm",
    }  # fmt: skip
