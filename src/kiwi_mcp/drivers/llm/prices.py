"""What a request to a model costs, in millionths of a US dollar: the owner's price, then the table of genai-prices."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING

from kiwi_mcp.domain.messages import TokenUsage
from kiwi_mcp.drivers.llm.provider import ModelChoice, ModelPrice

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, PriceCalculation

_MILLION = 1_000_000


def cost_micros(usage: TokenUsage, choice: ModelChoice) -> int | None:
    """Return the cost of a reply; None if the price of its model is not known."""
    if choice.price is not None:
        return _declared(usage, choice.price)
    found = _looked_up(usage, choice)
    return None if found is None else _rounded_up(found.total_price)


def worst_case_micros(input_tokens: int, max_output: int, choice: ModelChoice) -> int | None:
    """Return the most that a request can cost: all its input at the dearest price, and all the output it may have."""
    cases = (
        TokenUsage(input=input_tokens, output=max_output),
        TokenUsage(cache_write=input_tokens, output=max_output),
    )
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


def _declared(usage: TokenUsage, price: ModelPrice) -> int:
    total = (
        usage.input * price.input
        + usage.output * price.output
        + usage.cache_read * price.cache_read
        + usage.cache_write * price.cache_write
    )
    return -(-total // _MILLION)


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


def _rounded_up(dollars: Decimal) -> int:
    return int((dollars * _MILLION).to_integral_value(ROUND_CEILING))
