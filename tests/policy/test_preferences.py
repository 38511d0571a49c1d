"""The preferences of the owner: every key, precedence, and misspelt keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.policy.preferences import (
    Preference,
    PreferenceLayer,
    PreferenceSection,
    check_preferences,
    owner_preferences,
)

WORDS = st.sampled_from(["a", "b", "local/a", "project/local/a", "*", "a*", "local/*", "project/local/*"])
LAYERS = st.dictionaries(WORDS, st.booleans()).map(
    lambda entries: PreferenceLayer.of(Preference(word, is_sent) for word, is_sent in entries.items())
)
NAMES = ("project/local/a", "local/a", "a")


@pytest.fixture
def user(home: Path) -> Path:
    (home / ".ai").mkdir()
    return home / ".ai"


def write(user: Path, text: str) -> None:
    (user / "preferences.yaml").write_text(text)


def sent(wishes: PreferenceSection) -> list[str]:
    return [wish.word for wish in (*wishes.named, *wishes.patterns)]


def test_without_a_file_the_defaults_apply(user: Path) -> None:
    found = owner_preferences(user)
    assert sent(found.sections["always_send"]) == ["execute", "help", "load", "search"]
    own = ["project/local/*", "user/local/*"]
    assert sent(found.sections["resources"]) == own
    assert sent(found.sections["prompts"]) == ["project/agents/*", "project/claude/*", *own]
    assert found.task_after == 5
    write(user, "# nothing but a comment\n")
    assert owner_preferences(user) == found


def test_every_key_is_read_and_a_list_means_yes(user: Path) -> None:
    write(
        user,
        "always_send:\n  weather: true\n  mcp/everything/echo: {as: echo}\n  everything/*: true\n  help: false\n"
        "prompts: [review, 'everything/*']\nresources: {'*': false}\ntask_after: 0.5\n",
    )
    found = owner_preferences(user)
    assert sent(found.sections["always_send"]) == [
        "execute", "load", "mcp/everything/echo", "search", "weather", "everything/*",
    ]  # fmt: skip
    echo = found.sections["always_send"].about(["mcp/everything/echo"])
    assert echo is not None
    assert echo.name == "echo"
    assert sent(found.sections["prompts"]) == [
        *("review", "everything/*", "project/agents/*", "project/claude/*"),
        *("project/local/*", "user/local/*"),
    ]
    decided = found.sections["resources"].about(["project/local/guide", "local/guide", "guide"])
    assert decided == Preference("*", is_sent=False)
    assert found.task_after == 0.5


@pytest.mark.req("D8")
def test_the_owner_overrides_single_defaults(user: Path) -> None:
    write(user, "always_send: {load: false}\n")
    assert sent(owner_preferences(user).sections["always_send"]) == ["execute", "help", "search"]
    write(user, "always_send: {'*': false, load: true}\n")
    assert sent(owner_preferences(user).sections["always_send"]) == ["load"]


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("always_sent: [a]", "always_sent", "is not a known key"),
        ("- a", "", "is not a mapping"),
        ("always_send: weather", "always_send", "is neither a mapping nor a list"),
        ("always_send: [1]", "always_send", "is not a list of names"),
        ("always_send: {weather: yes}", "always_send.weather", "says neither yes nor no"),
        ("always_send: {weather: }", "always_send.weather", "says neither yes nor no"),
        ("always_send: {weather: {name: w}}", "always_send.weather.name", "is not a known key"),
        ("always_send: {weather: {as: 'a b'}}", "always_send.weather.as", "is not a name that clients can call"),
        ("always_send: {weather: {as: 5}}", "always_send.weather.as", "is not a name that clients can call"),
        ("always_send: {'w*': {as: w}}", "always_send.w*.as", "gives one name to several items"),
        ("prompts: {' ': true}", "prompts", "has an entry that can name nothing"),
        ("resources: {guide: {as: g}}", "resources.guide", "is not true or false"),
        ("task_after: soon", "task_after", "is not a number of seconds"),
        ("task_after: true", "task_after", "is not a number of seconds"),
        ("task_after: -1", "task_after", "is not a number of seconds"),
        ("a: [", "", ""),
        ("always_send: !!python/name:os.system x", "", ""),
    ],
)
def test_a_misspelt_key_is_reported_and_the_defaults_apply(user: Path, text: str, place: str, reason: str) -> None:
    product = owner_preferences(user)
    write(user, text)
    found = owner_preferences(user)
    assert found.fault is not None
    assert any(issue.place.startswith(place) and reason in issue.reason for issue in found.fault.issues)
    assert found.sections == product.sections
    with pytest.raises(InvalidManifest):
        check_preferences(user)


def test_an_unreadable_file_is_reported_too(user: Path) -> None:
    (user / "preferences.yaml").write_bytes(b"\xff\xfe\x00")
    assert owner_preferences(user).fault is not None
    (user / "preferences.yaml").unlink()
    (user / "preferences.yaml").mkdir()
    assert owner_preferences(user).fault is not None


def test_too_many_entries_are_refused(user: Path) -> None:
    write(user, "always_send:\n" + "".join(f"  tool_{number}: true\n" for number in range(1_001)))
    fault = owner_preferences(user).fault
    assert fault is not None
    assert "more than 1,000 entries" in fault.message


def test_a_change_is_seen_by_the_next_reader(user: Path) -> None:
    write(user, "task_after: 1\n")
    assert owner_preferences(user).task_after == 1
    draft = user / "draft"
    draft.write_text("task_after: 2\n")
    draft.replace(user / "preferences.yaml")
    assert owner_preferences(user).task_after == 2


@settings(max_examples=60, deadline=None)
@given(owner=LAYERS, product=LAYERS)
def test_the_preference_of_the_owner_for_an_item_decides(owner: PreferenceLayer, product: PreferenceLayer) -> None:
    decided, own = PreferenceSection(owner, product).about(NAMES), owner.about(NAMES)
    assert decided == (own if own is not None else product.about(NAMES))


@settings(max_examples=60, deadline=None)
@given(layer=LAYERS)
def test_a_name_wins_over_a_pattern_and_a_longer_name_over_a_shorter(layer: PreferenceLayer) -> None:
    decided = layer.about(NAMES)
    named = [layer.names[name] for name in NAMES if name in layer.names]
    if named:
        assert decided == named[0]
    elif decided is not None:
        assert decided.is_pattern
