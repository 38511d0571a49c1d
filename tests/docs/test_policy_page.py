"""The policy page shows a valid policy."""

from __future__ import annotations

import re
from pathlib import Path

from kiwi_mcp.kernel.verbs.help import page
from kiwi_mcp.policy.policy_files import owner_policy


def test_the_rules_on_the_policy_page_are_valid(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", page("policy"), re.MULTILINE | re.DOTALL)
    (tmp_path / "policy.yaml").write_text(shown)
    policy = owner_policy(tmp_path)
    assert policy.grant.items.match("mcp/mail/send@1.0.0") == "mcp/mail/*"
    assert policy.grant.items.match("mcp/files/read@1.0.0") is None
    assert policy.grant.hosts.allow == ("127.0.0.1:8000", "*.corp.example")
    assert policy.roots == (Path("/srv/shared"),)
    assert policy.grant.write.allow == ("out", "~/notes/drafts")
    assert policy.actors["bob"].verbs.match("execute.delete", "verb") == "execute.delete"
    assert [condition.items for condition in policy.grant.conditions] == ["*/pay@*", "*/convert@*", "mcp/github/*"]
