"""Errors of invalid requests are short and name the nearest valid value."""

from __future__ import annotations

from collections.abc import Callable

from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]


def test_an_unknown_action_is_reported_in_one_short_sentence(ask: Ask) -> None:
    response = ask("execute", action="publsh", item_id="greet").content
    assert response["message"] == "Invalid request for `execute`: action: there is no 'publsh'."
    assert str(response["suggestion"]).startswith("Did you mean `publish`? Use one of: run, code, sign,")


def test_every_verb_has_a_help_page(ask: Ask) -> None:
    for topic, page in {"runs": "runs", "migrate": "migrate", "up": "up", "gateway": "up", "push": "registry"}.items():
        assert ask("help", topic=topic).content["topic"] == page
    assert "kiwi registry" in str(ask("help").content["help"])
