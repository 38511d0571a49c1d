"""Reading what was sent: a value of the right shape, or a refusal that lists every fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.manifest.names import did_you_mean

_QUOTED = re.compile(r"'([^']*)'")
Model = TypeVar("Model", bound=BaseModel)


def read(model: type[Model], verb: str, written: Mapping[str, object]) -> Model:
    """Return what a verb or an action was asked with."""
    try:
        return model.model_validate(written)
    except ValidationError as error:
        issues = [_issue(fault, model) for fault in error.errors(include_url=False)]
        raise InvalidRequest(
            f"`{verb}` cannot be asked like this: " + "; ".join(f"{i.place}: {i.reason}" for i in issues) + ".",
            suggestion=issues[0].fix,
            issues=[issue.to_json() for issue in issues],
        ) from error


def _issue(fault: ErrorDetails, model: type[BaseModel]) -> Issue:
    place, reason = fault["loc"], fault["msg"]
    name = ".".join(str(part) for part in place)
    words = [field.alias or word for word, field in model.model_fields.items()]
    if name not in words and len(place) == 1:
        fix = did_you_mean(name, words).strip() or f"The verb's words are: {', '.join(words) or 'none'}."
        return Issue(name, "is not a word of this verb", fix)
    if fault["type"] == "literal_error" and isinstance(given := fault["input"], str):
        known = _QUOTED.findall(fault["ctx"]["expected"])
        return Issue(
            name, f"there is no {given[:60]!r}", f"{did_you_mean(given, known)}Use one of: {', '.join(known)}."
        )
    told = reason[:1].lower() + reason[1:]
    return Issue(name, told, f"Send `{name}` otherwise: its {told}." if "should" in told else f"Send `{name}`.")
