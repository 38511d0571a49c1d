"""The needs of an item, checked against the rules: granted with denied parts hidden, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, Unavailable
from kiwi_mcp.domain.grants import Grant, Rights, Rules, empty_grant, narrow
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Needs
from kiwi_mcp.policy.needs import ProcessAccess, command_access, reach


@pytest.fixture
def space(project: Path, home: Path) -> Space:
    for name in ("docs/a.md", "docs/private/key.pem", "out/old.txt", ".env", "docs/.env.local", "secrets/token"):
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (home / ".ai").mkdir()
    (home / ".ai" / "policy.yaml").write_text("")
    (home / "notes").mkdir()
    (home / "notes" / "one.md").write_text("1")
    return Space(project, home / ".ai", home / ".cache")


def files(**rules: Rules) -> Rights:
    return Rights((Grant(read=rules.get("read", Rules(("**",))), write=rules.get("write", Rules(("**",)))),))


def refusal(needs: Needs, rights: Rights, space: Space) -> str:
    with pytest.raises(PolicyDenied) as refused:
        reach(needs, rights, space)
    return refused.value.message


def test_without_needs_nothing_is_granted(space: Space) -> None:
    assert reach(Needs(), Rights(), space) == ProcessAccess()


def test_a_declared_project_folder_is_granted(space: Space) -> None:
    given = reach(Needs(read=("docs/**", "./docs/"), write=("out",)), Rights(), space)

    assert given.readable == (str(space.project / "docs"),)
    assert given.writable == (str(space.project / "out"),)
    assert given.hidden == (str(space.project / "docs/.env.local"),)


def test_secret_files_are_hidden_in_the_project_and_never_granted(space: Space) -> None:
    (space.project / ".ai" / ".env").write_text("KEY=1")

    assert set(reach(Needs(read=(".",)), Rights(), space).hidden) == {
        str(space.project / ".env"),
        str(space.project / ".ai/.env"),
        str(space.project / "docs/.env.local"),
    }
    assert "holds secrets" in refusal(Needs(read=(".env",)), Rights(), space)
    assert "Kiwi's own" in refusal(Needs(read=("~/.ai",)), files(read=Rules(("/**",))), space)


def test_outside_the_project_only_paths_in_a_rule_are_granted(space: Space, home: Path) -> None:
    assert "no rule of policy.yaml allows" in refusal(Needs(read=("~/notes",)), Rights(), space)
    allowed = files(read=Rules(("**", "~/notes")))
    assert reach(Needs(read=("~/notes",)), allowed, space).readable == (str(home / "notes"),)
    assert reach(Needs(read=(str(home / "notes/one.md"),)), allowed, space).readable == (str(home / "notes/one.md"),)
    assert "no rule" in refusal(Needs(read=(str(home),)), allowed, space)


def test_rules_outside_the_project_do_not_affect_the_project(space: Space, home: Path) -> None:
    both = Needs(read=("docs", "~/notes"))

    for beside in (("~/notes",), (str(home / "notes"), "~/other/**")):
        given = reach(both, files(read=Rules(beside)), space).readable
        assert given == (str(space.project / "docs"), str(home / "notes"))
    for rules in (Rules(), Rules(("out", "~/notes")), Rules((str(space.project / "out"), "~/notes"))):
        assert "no rule of policy.yaml allows" in refusal(Needs(read=("docs",)), files(read=rules), space)
    denied = Rules(("~/notes",), ("docs",))
    assert "'docs'" in refusal(Needs(read=("docs",)), files(read=denied), space).replace(f"{space.project}/", "")


def test_the_path_list_of_another_actor_is_complete(space: Space) -> None:
    theirs = narrow(Rights(), Grant(read=Rules(("~/notes",)), name="bob"))

    assert "no rule of bob allows" in refusal(Needs(read=("docs",)), theirs, space)


def test_a_rule_for_some_files_does_not_grant_their_folder(space: Space) -> None:
    some = files(read=Rules(("docs/*.md",)))

    assert reach(Needs(read=("docs/a.md",)), some, space).readable == (str(space.project / "docs/a.md"),)
    assert "no rule" in refusal(Needs(read=("docs",)), some, space)


def test_a_denied_path_inside_a_grant_is_hidden_and_a_denied_grant_is_refused(space: Space) -> None:
    rights = files(read=Rules(("**",), ("**/*.pem", "secrets")))

    assert set(reach(Needs(read=(".",)), rights, space).hidden) >= {
        str(space.project / "docs/private/key.pem"),
        str(space.project / "secrets"),
    }
    assert "the rule" in refusal(Needs(read=("secrets/token",)), rights, space)
    assert "'secrets'" not in str(reach(Needs(read=("docs",)), rights, space).hidden)


def test_a_path_that_may_not_be_written_is_read_only_inside_a_grant(space: Space) -> None:
    given = reach(Needs(write=("docs",)), files(write=Rules(("**",), ("docs/a.md",))), space)

    assert given.readable == (str(space.project / "docs/a.md"),)
    assert given.writable == (str(space.project / "docs"),)


def test_a_rule_on_a_link_denies_its_target(space: Space, home: Path) -> None:
    (space.project / "shortcut").symlink_to(space.project / "secrets")
    (space.project / "docs" / "inner.pem").symlink_to("a.md")

    assert "the rule" in refusal(Needs(read=("secrets",)), files(read=Rules(("**",), ("shortcut",))), space)
    hidden = reach(Needs(read=("docs",)), files(read=Rules(("**",), ("docs/*.pem",))), space).hidden
    assert str(space.project / "docs/a.md") in hidden


def test_a_link_in_the_project_grants_nothing_outside(space: Space, home: Path) -> None:
    (space.project / "out" / "away").symlink_to(home / "notes")

    assert "leads through a link" in refusal(Needs(read=("out/away",)), Rights(), space)
    assert "names no files" in refusal(Needs(read=("docs/../../home",)), Rights(), space)


def test_a_writable_path_or_its_parent_must_exist(space: Space) -> None:
    with pytest.raises(Unavailable) as refused:
        reach(Needs(write=("build",)), Rights(), space)
    assert "mkdir -p" in refused.value.suggestion
    assert reach(Needs(write=("out", "out/new.txt")), Rights(), space).writable == (str(space.project / "out"),)
    assert reach(Needs(read=("absent",)), Rights(), space) == ProcessAccess()


def test_a_folder_too_large_to_scan_is_refused(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_mcp.policy.needs.MOST_ENTRIES", 3)

    assert "too many" in refusal(Needs(read=(".",)), files(read=Rules(("**",), ("**/*.pem",))), space)


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


@pytest.mark.parametrize("path", [".git/hooks", ".ai/tools", "vendor/lib/.git/hooks", ".github", ".mcp.json"])
def test_settings_of_other_programs_are_never_writable(space: Space, path: str) -> None:
    put(space.project, f"{path}/x")

    assert "other programs run or obey" in refusal(Needs(write=(path,)), Rights(), space)
    assert reach(Needs(read=(path,)), Rights(), space).readable == (str(space.project / path),)


def test_a_project_inside_a_settings_folder_is_still_a_project(space: Space) -> None:
    put(space.project, ".claude/worktrees/one/out/x")
    inner = Space(space.project / ".claude/worktrees/one", space.user, space.cache)

    assert reach(Needs(write=("out",)), Rights(), inner).writable == (str(inner.project / "out"),)


def test_settings_of_other_programs_further_down_are_read_only(space: Space) -> None:
    put(space.project, "vendor/lib/.git/hooks/pre-commit", "vendor/.ai/tools/x.yaml", ".git/config")

    given = reach(Needs(write=(".",)), Rights(), space)

    assert set(given.readable) == {str(space.project / "vendor/lib/.git"), str(space.project / "vendor/.ai")}
    assert given.writable == (str(space.project),)


def test_a_secret_file_is_hidden_at_any_depth(space: Space) -> None:
    put(space.project, "docs/app/one/two/three/.env", "docs/app/.env.production", "docs/app/env", "docs/.envoy")

    assert set(reach(Needs(read=("docs",)), Rights(), space).hidden) == {
        str(space.project / name)
        for name in ("docs/app/one/two/three/.env", "docs/app/.env.production", "docs/.env.local")
    }


def test_many_files_hide_no_near_secret_and_unscanned_depth_is_reported(
    space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.policy.needs.MOST_ENTRIES", 3)
    put(space.project, "docs/1/2/3/.env", "docs/1/2/3/4/5/.env")

    given = reach(Needs(read=("docs",)), Rights(), space)

    assert str(space.project / "docs/1/2/3/.env") in given.hidden
    assert str(space.project / "docs/1/2/3/4/5/.env") not in given.hidden
    assert "deeper than 4 folders" in given.warnings[0]
    monkeypatch.setattr("kiwi_mcp.policy.needs._MOST_NEAR", 3)
    assert "too many" in refusal(Needs(read=("docs",)), Rights(), space)


def named(space: Space, path: Path, rights: Rights = Rights(), *, is_owners: bool = False) -> ProcessAccess:  # noqa: B008 - frozen
    return command_access(
        {str(path): (str(path.parent),)}, (), SandboxProfile("sandboxed"), rights, space, is_owners=is_owners
    )


def test_a_command_gets_the_project_files_it_names_without_secrets(space: Space) -> None:
    put(space.project, "servers/one.py", "servers/inner/.env", "servers/.npmrc")

    given = named(space, space.project / "servers/one.py")
    assert given.readable == (str(space.project / "servers"),)
    assert set(given.hidden) == {str(space.project / "servers/inner/.env"), str(space.project / "servers/.npmrc")}


def test_a_command_of_a_project_gets_nothing_outside_that_is_not_declared(space: Space, home: Path) -> None:
    put(home, "servers/one.py", ".ssh/config", ".ai/state/secrets.key", ".cache/x/y")
    script = home / "servers/one.py"

    with pytest.raises(PolicyDenied, match="does not declare"):
        named(space, script)
    declared = SandboxProfile("sandboxed", readable=(str(script),))
    around = {str(script): (str(script.parent),)}
    assert command_access(around, (), declared, Rights(), space, is_owners=False).readable == ()
    assert named(space, script, is_owners=True).readable == (str(home / "servers"),)
    for hers in (".ai/state/secrets.key", ".cache/x/y"):
        assert named(space, home / hers, is_owners=True).readable == ()
    with pytest.raises(PolicyDenied, match="does not declare"):
        named(space, home / ".ssh/config", is_owners=True)


def test_a_denying_rule_wins_over_a_file_that_a_command_names(space: Space) -> None:
    put(space.project, "secrets/one.py", "docs/private/two.py")
    rights = files(read=Rules(("**",), ("secrets", "docs/private/*.pem")))

    with pytest.raises(PolicyDenied, match=r"the rule '.*secrets'"):
        named(space, space.project / "secrets/one.py", rights)
    given = named(space, space.project / "docs/private/two.py", rights)
    assert given.hidden == (str(space.project / "docs/private/key.pem"),)


def test_nothing_in_the_cache_is_granted(space: Space) -> None:
    put(space.cache, "environments/x")

    assert "Kiwi's own" in refusal(Needs(read=("~/.cache/environments",)), files(read=Rules(("/**",))), space)


def test_hosts_are_granted_with_denied_and_private_ones(space: Space) -> None:
    rights = Rights((Grant(hosts=Rules(("127.0.0.1:8000",), ("tracker.test",))),))

    given = reach(Needs(hosts=("*.test", "127.0.0.1:8000")), rights, space)
    assert (given.hosts, given.denied_hosts) == (("*.test", "127.0.0.1:8000"), ("tracker.test",))
    assert given.private_hosts == ("127.0.0.1:8000",)
    assert "tracker.test" in refusal(Needs(hosts=("tracker.test:443",)), rights, space)
    for near in ("127.0.0.1", "10.0.0.7:80", "[::1]:80", "localhost"):
        assert "not on the public network" in refusal(Needs(hosts=(near,)), rights, space)


def test_a_caller_with_granted_hosts_reaches_no_other(space: Space) -> None:
    child = narrow(Rights(), Grant(hosts=Rules(("a.test",)), is_public=False, name="a directive"))

    assert reach(Needs(hosts=("a.test",)), child, space).hosts == ("a.test",)
    assert "no rule of a directive" in refusal(Needs(hosts=("b.test",)), child, space)
    with pytest.raises(KiwiError):
        reach(Needs(read=("docs",)), narrow(Rights(), empty_grant("a directive")), space)


def test_denied_commands_are_refused(space: Space) -> None:
    rights = Rights((Grant(commands=Rules(("*",), ("curl",))),))

    assert "curl" in refusal(Needs(commands=("curl",)), rights, space)
    assert reach(Needs(commands=("git",)), rights, space) == ProcessAccess()


def test_a_name_with_pattern_characters_is_only_that_name(tmp_path: Path, home: Path) -> None:
    project = tmp_path / "a[b]*c"
    (project / "docs").mkdir(parents=True)

    given = reach(Needs(read=("docs",)), Rights(), Space(project, home / ".ai", home))
    assert given.readable == (os.path.realpath(project / "docs"),)
