"""The owner's policy: one file, read strictly, seen at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.grants import Grant, Rules
from kiwi_mcp.policy.owner import Policy, owner_policy


def written(folder: Path, text: str) -> Policy:
    (folder / "policy.yaml").write_text(text)
    return owner_policy(folder)


def test_without_a_file_everything_local_is_allowed_and_no_private_host(tmp_path: Path) -> None:
    assert owner_policy(tmp_path) == Policy(Grant(Rules(allow=("*",)), Rules()), ())


def test_every_word_of_the_file_is_read(tmp_path: Path) -> None:
    policy = written(
        tmp_path,
        'items: {allow: ["project/*"], deny: ["*/rm@*"]}\nhosts: {allow: ["127.0.0.1:80"], deny: [evil.test]}\n'
        "roots: [/srv/shared]\n",
    )

    assert policy.grant.items == Rules(("project/*",), ("*/rm@*",))
    assert policy.grant.hosts == Rules(("127.0.0.1:80",), ("evil.test",))
    assert policy.roots == (Path("/srv/shared"),)


def test_a_change_of_the_file_holds_at_once(tmp_path: Path) -> None:
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
def test_a_rule_that_cannot_be_read_refuses_and_is_never_ignored(text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidManifest):
        written(tmp_path, text)


def test_a_policy_that_cannot_be_opened_or_is_no_text_refuses(tmp_path: Path) -> None:
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
