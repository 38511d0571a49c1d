"""What was sent wrong is told briefly, with what was perhaps meant."""

from __future__ import annotations

from collections.abc import Callable

from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]


def test_an_unknown_action_is_told_in_one_short_sentence(ask: Ask) -> None:
    told = ask("execute", action="publsh", item_id="greet").content
    assert told["message"] == "`execute` cannot be asked like this: action: there is no 'publsh'."
    assert str(told["suggestion"]).startswith("Did you mean `publish`? Use one of: run, sign,")


def test_every_verb_has_a_page_of_help(ask: Ask) -> None:
    for topic, page in {"runs": "runs", "migrate": "migrate", "up": "up", "gateway": "up", "push": "registry"}.items():
        assert ask("help", topic=topic).content["topic"] == page
    assert "kiwi registry" in str(ask("help").content["help"])
