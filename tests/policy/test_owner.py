"""The policy of the owner: one file, read strictly, applied at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.grants import Allow, Grant, Rights, Rules, narrow
from kiwi_mcp.policy.policy_files import Policy, owner_policy


def written(folder: Path, text: str) -> Policy:
    (folder / "policy.yaml").write_text(text)
    return owner_policy(folder)


def test_without_a_file_local_use_is_allowed_and_private_hosts_are_not(tmp_path: Path) -> None:
    assert owner_policy(tmp_path) == Policy(Grant(Rules(allow=("*",)), Rules()), ())


def test_every_key_of_the_file_is_read(tmp_path: Path) -> None:
    policy = written(
        tmp_path,
        'items: {allow: ["project/*"], deny: ["*/rm@*"]}\nhosts: {allow: ["127.0.0.1:80"], deny: [evil.test]}\n'
        "roots: [/srv/shared]\n",
    )

    assert policy.grant.items == Rules(("project/*",), ("*/rm@*",))
    assert policy.grant.hosts == Rules(("127.0.0.1:80",), ("evil.test",))
    assert policy.roots == (Path("/srv/shared"),)


def test_a_dangling_symlink_is_an_unreadable_policy(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").symlink_to(tmp_path / "elsewhere.yaml")

    with pytest.raises(InvalidManifest):
        owner_policy(tmp_path)


def test_a_changed_file_applies_at_once(tmp_path: Path) -> None:
    assert written(tmp_path, "hosts: {allow: [a.test]}\n").grant.hosts.allow == ("a.test",)
    assert written(tmp_path, "hosts: {allow: [b.test]}\n").grant.hosts.allow == ("b.test",)
    (tmp_path / "policy.yaml").unlink()
    assert owner_policy(tmp_path).grant.hosts.allow == ()


def test_an_empty_file_is_the_default_and_an_empty_list_allows_nothing(tmp_path: Path) -> None:
    assert written(tmp_path, "").grant == Grant()
    assert written(tmp_path, "items: {allow: []}\n").grant.items.match("project/local/say@1.0.0") == ""


@pytest.mark.parametrize(
    "text",
    [
        "itmes: {deny: ['*']}\n",
        "items: {dney: ['*']}\n",
        "items: [all]\n",
        "items: {deny: '*'}\n",
        "hosts: {allow: [1, 2]}\n",
        "roots: /srv\n",
        "- items\n",
        "items\n",
        "items: {deny: [\n",
        "items: {deny: ['*']}\nitems: {allow: ['*']}\n",
    ],
)
def test_an_unreadable_rule_refuses_and_is_never_ignored(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest):
        written(tmp_path, text)


def test_a_policy_that_cannot_be_read_refuses(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_bytes(b"items: \xff\xfe\n")
    with pytest.raises(KiwiError):
        owner_policy(tmp_path)
    (tmp_path / "policy.yaml").unlink()
    (tmp_path / "policy.yaml").mkdir()
    with pytest.raises(KiwiError):
        owner_policy(tmp_path)
    (tmp_path / "policy.yaml").rmdir()
    (tmp_path / "policy.yaml").symlink_to(tmp_path / "policy.yaml")
    with pytest.raises(KiwiError):
        owner_policy(tmp_path)


def test_every_key_applies_to_all_actors_and_to_each(tmp_path: Path) -> None:
    policy = written(
        tmp_path,
        "verbs: {deny: [registry]}\ncommands: {deny: [curl]}\nvariables: {allow: [API_*]}\nspawn: {allow: []}\n"
        "files: {read: {deny: [./secrets/]}, write: {allow: [out, ~/x, /srv/y]}}\n"
        "actors: {bob: {hosts: {allow: [a.test]}, items: {allow: ['*/greet@*']}}, eve: {}}\n",
    )

    grant, bob, eve = policy.grant, policy.actors["bob"], policy.actors["eve"]
    assert (grant.verbs, grant.commands) == (Rules(("*",), ("registry",)), Rules(("*",), ("curl",)))
    assert (grant.variables, grant.spawn) == (Rules(("API_*",)), Rules())
    assert (grant.read, grant.write) == (Rules(("**",), ("secrets",)), Rules(("out", "~/x", "/srv/y")))
    assert (bob.is_public, bob.is_secretive, bob.name) == (False, True, "policy.yaml for bob")
    assert (eve.is_public, eve.is_secretive, eve.items) == (True, False, Grant().items)


def test_an_actor_without_rules_has_all_that_the_owner_allows(tmp_path: Path) -> None:
    policy = written(tmp_path, "files: {read: {allow: [/srv/y]}}\nhosts: {allow: [10.0.0.7]}\nactors: {eve: {}}\n")
    rights = narrow(Rights((policy.grant,)), policy.actors["eve"])

    assert rights.hosts == Rules(("10.0.0.7",))
    assert isinstance(rights.verdict("read", "/srv/y/z"), Allow)


@pytest.mark.parametrize(
    "text",
    [
        "files: {raed: {}}\n",
        "files: {read: {allow: ['../x']}}\n",
        "files: {read: {allow: ['~root/x']}}\n",
        "files: {read: [docs]}\n",
        "actors: [bob]\n",
        "actors: {bob: {itmes: {}}}\n",
        "actors: {bob: {roots: [/]}}\n",
        "actors: {bob: [greet]}\n",
        "conditions: {items: '*'}\n",
        "conditions: [{items: '*'}]\n",
        "conditions: [{hours: '08:00-18:00'}]\n",
        "conditions: [{items: '*', hours: 8-18}]\n",
        "conditions: [{items: '*', days: [someday]}]\n",
        "conditions: [{items: '*', day: [mon]}]\n",
        "conditions: [{items: '*', parameters: {x: {maximum: many}}}]\n",
        "conditions: [{items: '*', parameters: {x: {path: a, maximum: 1}}}]\n",
        "conditions: [{items: '*', parameters: {x: 5}}]\n",
        "conditions: [{items: '*', per_minute: 0}]\n",
        "conditions: [{items: '*', per_minute: true}]\n",
        "verbs: {allow: search}\n",
    ],
)
def test_a_misspelt_key_refuses_in_any_position(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest):
        written(tmp_path, text)
