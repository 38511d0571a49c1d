"""The store settings: each key, and that one invalid key stops everything."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest, KiwiError, RemoteNotFound, Unavailable
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.kernel.remotes import add_remote, remove_remote
from kiwi_mcp.kernel.settings import (
    RegistrySettings,
    RemoteSettings,
    default_url,
    registry_settings,
    search_mode,
)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KIWI_REGISTRY", raising=False)


@pytest.fixture
def user(home: Path) -> Path:
    (home / ".ai").mkdir()
    return home / ".ai"


def write(user: Path, text: str) -> None:
    (user / "registry.yaml").write_text(text)


def test_without_a_file_the_store_is_in_the_user_space(user: Path) -> None:
    login = pwd.getpwuid(os.geteuid()).pw_name
    assert registry_settings(user) == RegistrySettings(default_url(user), Actor(login, ("public",)))
    assert default_url(user) == f"sqlite:///{user}/state/registry.db"
    write(user, "# nothing but a comment\n")
    assert registry_settings(user) == RegistrySettings(default_url(user), Actor(login, ("public",)))


def test_every_setting_is_read(user: Path) -> None:
    write(
        user,
        "url: postgresql://db.example.com/kiwi\nactor: ann\nnamespaces: [acme, public]\n"
        "remotes:\n  team: {url: https://kiwi.example.com, token: '${TEAM_TOKEN}'}\n  share: /srv/kiwi\n"
        "runs: {count: 50, days: 7}\n",
    )

    assert registry_settings(user) == RegistrySettings(
        "postgresql://db.example.com/kiwi",
        Actor("ann", ("acme", "public")),
        {"team": RemoteSettings("https://kiwi.example.com", "${TEAM_TOKEN}"), "share": RemoteSettings("/srv/kiwi")},
        run_count=50,
        run_days=7,
    )


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("urls: x", "urls", "is not a known key"),
        ("url: 5", "url", "is not a text"),
        ("url: ''", "url", "is not a text"),
        ("actor: [ann]", "actor", "is not a text"),
        ("remotes: {team: 'sqlite:///srv/team.db'}", "remotes.team", "is a database, which is not a remote"),
        ("remotes: {team: {url: 'postgresql://db/kiwi'}}", "remotes.team", "is a database, which is not a remote"),
        ("- a", "", "is not a mapping"),
        ("word", "", "is not a mapping"),
        ("namespaces: acme", "namespaces", "is not a list"),
        ("namespaces: []", "namespaces", "is not a list"),
        ("namespaces: [kiwi]", "namespaces", "'kiwi' cannot be a namespace"),
        ("namespaces: [Acme, 5]", "namespaces", "cannot be a namespace"),
        ("namespaces: ['../x']", "namespaces", "cannot be a namespace"),
        ("remotes: /srv/kiwi", "remotes", "is not a mapping"),
        ("remotes: {team: }", "remotes.team", "does not say where it is"),
        ("remotes: {team: [a]}", "remotes.team", "is not a mapping"),
        ("remotes: {team: {url: /x, tokne: a}}", "remotes.team.tokne", "is not a known key"),
        ("remotes: {Team: /x}", "remotes.Team", "cannot name a remote"),
        ("remotes: {team: {url: /x, token: s3cret}}", "remotes.team.token", "is not the name of a variable"),
        ("remotes: {team: {url: /x, token: 12345}}", "remotes.team.token", "is not the name of a variable"),
        ("runs: 5", "runs", "is not a mapping"),
        ("runs: {cuont: 5}", "runs.cuont", "is not a known key"),
        ("runs: {count: 0}", "runs.count", "is not a number"),
        ("runs: {count: true}", "runs.count", "is not a number"),
        ("runs: {days: forever}", "runs.days", "is not a number"),
    ],
)
def test_an_invalid_setting_is_reported_with_its_place_and_nothing_is_assumed(
    user: Path, text: str, place: str, reason: str
) -> None:
    write(user, text)

    with pytest.raises(InvalidManifest) as fault:
        registry_settings(user)

    assert any(issue.place == place and reason in issue.reason for issue in fault.value.issues)
    assert all(issue.fix for issue in fault.value.issues)
    assert "s3cret" not in fault.value.message


@pytest.mark.parametrize("data", [b"url: [", b"\xff\xfe", b"a: &a [*a]", b"url: x\nurl: y"])
def test_a_file_that_cannot_be_read_is_refused(user: Path, data: bytes) -> None:
    (user / "registry.yaml").write_bytes(data)

    with pytest.raises(KiwiError) as fault:
        registry_settings(user)
    assert "registry.yaml" in fault.value.message


def test_all_invalid_settings_are_reported_at_once(user: Path) -> None:
    write(user, "urls: x\nnamespaces: [A, B]\nruns: {count: 0, days: 0}\n")

    with pytest.raises(InvalidManifest) as fault:
        registry_settings(user)
    assert len(fault.value.issues) == 5


def test_a_variable_selects_another_store_and_nothing_else(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(user, "url: sqlite:////srv/a.db\nactor: ann\nnamespaces: [acme]\n")
    monkeypatch.setenv("KIWI_REGISTRY", "sqlite:////srv/b.db")
    assert registry_settings(user) == RegistrySettings("sqlite:////srv/b.db", Actor("ann", ("acme",)))
    monkeypatch.setenv("KIWI_REGISTRY", "")
    assert registry_settings(user).url == "sqlite:////srv/a.db"


def test_settings_stay_the_same_object_until_the_file_changes(user: Path) -> None:
    write(user, "actor: ann\n")
    first = registry_settings(user)
    assert registry_settings(user) is first
    write(user, "actor: beatrice\n")
    assert registry_settings(user).actor.name == "beatrice"
    (user / "registry.yaml").unlink()
    assert registry_settings(user).url == default_url(user)


def test_adding_a_remote_preserves_the_rest_of_the_file(user: Path) -> None:
    write(user, "# mine\nactor: ann  # me\nremotes:\n  share: /srv/kiwi\n")

    add_remote(user, "team", RemoteSettings("https://kiwi.example.com", "${TEAM_TOKEN}"))

    assert (user / "registry.yaml").read_text().startswith("# mine\nactor: ann  # me\nremotes:\n  share: /srv/kiwi\n")
    assert registry_settings(user).remotes == {
        "share": RemoteSettings("/srv/kiwi"),
        "team": RemoteSettings("https://kiwi.example.com", "${TEAM_TOKEN}"),
    }
    assert [path.name for path in user.iterdir()] == ["registry.yaml"]


def test_adding_a_remote_creates_a_missing_file(home: Path) -> None:
    add_remote(home / ".ai", "share", RemoteSettings("/srv/kiwi"))
    assert registry_settings(home / ".ai").remotes == {"share": RemoteSettings("/srv/kiwi")}


@pytest.mark.parametrize(
    ("name", "remote"),
    [
        ("Team", RemoteSettings("/srv/kiwi")),
        ("../x", RemoteSettings("/srv/kiwi")),
        ("team", RemoteSettings("")),
        ("team", RemoteSettings("https://kiwi.example.com", "s3cret")),
        ("team", RemoteSettings("ftp://kiwi.example.com")),
        ("team", RemoteSettings("shelf")),
    ],
)
def test_an_invalid_remote_is_not_written(user: Path, name: str, remote: RemoteSettings) -> None:
    with pytest.raises(InvalidRequest) as fault:
        add_remote(user, name, remote)
    assert "s3cret" not in fault.value.message
    assert not (user / "registry.yaml").exists()


@pytest.mark.parametrize("text", ["remotes: x\n", "url: [\n", "- a\n"])
def test_an_invalid_file_is_not_changed(user: Path, text: str) -> None:
    write(user, text)
    with pytest.raises(KiwiError):
        add_remote(user, "team", RemoteSettings("/srv/kiwi"))
    assert (user / "registry.yaml").read_text() == text


def test_an_invalid_file_is_reported_by_its_path(user: Path) -> None:
    write(user, "urls: x\n")
    with pytest.raises(InvalidManifest) as fault:
        registry_settings(user)
    assert f"{user}/registry.yaml has 1 issue" in fault.value.message


def test_comments_mode_and_symlink_survive_adding_and_removing_a_remote(user: Path, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.yaml"
    real.write_text("# nothing yet")
    real.chmod(0o640)
    (user / "registry.yaml").symlink_to(real)

    add_remote(user, "share", RemoteSettings("/srv/kiwi"))
    add_remote(user, "team", RemoteSettings("https://kiwi.example.com"))
    remove_remote(user, "share")

    assert (user / "registry.yaml").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert real.read_text() == "# nothing yet\nremotes:\n  team:\n    url: https://kiwi.example.com\n"
    with pytest.raises(RemoteNotFound):
        remove_remote(user, "share")


def test_a_new_file_is_private(user: Path) -> None:
    add_remote(user, "share", RemoteSettings("/srv/kiwi"))
    assert (user / "registry.yaml").stat().st_mode & 0o777 == 0o600


def test_a_space_that_cannot_be_written_is_reported(home: Path) -> None:
    (home / "file").write_text("in the way")
    with pytest.raises(Unavailable) as fault:
        add_remote(home / "file" / ".ai", "share", RemoteSettings("/srv/kiwi"))
    assert "cannot be written" in fault.value.message


@pytest.mark.parametrize(("variable", "mode"), [("", "words"), ("bogus", "words"), ("meaning", "meaning")])
def test_a_variable_that_names_no_search_mode_counts_as_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, mode: str
) -> None:
    (tmp_path / "registry.yaml").write_text("search: words\n")
    monkeypatch.setenv("KIWI_SEARCH", variable)
    assert search_mode(tmp_path) == mode
