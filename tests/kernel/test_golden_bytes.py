"""Bytes that are stored, hashed or signed: none of them changes without a migration."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Location, Manifest, Tool, TypeTraits
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import ServerListing
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec, ReadSpec
from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.kernel import Kernel, recorder
from kiwi_mcp.kernel.mcp_servers import offers_of
from kiwi_mcp.kernel.prepared import plan_digest
from kiwi_mcp.kernel.provenance import chain_digest
from kiwi_mcp.kernel.verbs import find_verb
from kiwi_mcp.primitives.secrets.encrypted_records import EncryptedRecord, EncryptedRecords
from kiwi_mcp.primitives.secrets.reveal import SecretScope
from kiwi_mcp.primitives.secrets.store import SecretStore
from kiwi_mcp.store.receipts import KIND, seal

_CHAIN = (("project/local/t@1.0.0", "aa"), ("builtin/local/bash_runtime@1.0.0", "bb"))
_PROCESS = Plan(
    "project/local/t@1.0.0",
    "aa",
    "process",
    _CHAIN,
    ProcessSpec(("bash", "/t.sh"), "/work", {"PATH": "/bin", "KEY": "${KEY}"}, b"{}", 30.0),
    {"name": "Ada", "times": 2},
    ("KEY",),
    facts={"environment": {"packages": ["x"]}},
    profile=SandboxProfile("sandboxed", readable=("/work",), writable=("/srv/out",), hosts=("example.com",)),
)
_HTTP = Plan(
    "user/local/api@2.0.0",
    "cc",
    "http",
    (("user/local/api@2.0.0", "cc"), ("builtin/local/http_client@1.0.0", "dd")),
    HttpSpec("POST", "https://example.com/users", {"authorization": "Bearer ${TOKEN}"}, {"name": "Ada"}),
    {"name": "Ada"},
    ("TOKEN",),
)
_MCP = Plan(
    "mcp/files/read@1",
    "ee",
    "mcp",
    (("mcp/files/read@1", "ee"), ("user/local/files@1.0.0", "ff")),
    ProcessSpec(("npx", "files"), "/work", {}, b"", 60.0),
    {"path": "a"},
    facts={"mcp": {"method": "tools/call", "params": {"name": "read"}}},
    profile=SandboxProfile("sandboxed"),
    effect="pure",
)
_READ = Plan("user/local/d@1.0.0", "aa", "read", (("user/local/d@1.0.0", "aa"),), ReadSpec("d.md", "bb"), {})


@pytest.mark.parametrize(
    ("plan", "digest"),
    [
        pytest.param(_PROCESS, "2ef09756e0f5268e28e7f2881ff876e15e2ceb458e855f9209103d8345330e71", id="process"),
        pytest.param(_HTTP, "641382864dbb5c75966157fedcf80ca6f4ef6442df52b32df5e1162f41070ed5", id="http"),
        pytest.param(_MCP, "a58cbe8beff4a4861302008087b0f4fff9ff82b4f48c3ef5b53c0f85a5cf3f4c", id="mcp"),
        pytest.param(_READ, "945449a9eca057cccc5230c696007725538087d6e808def23c87c729247785fb", id="read"),
    ],
)
def test_the_digest_of_a_plan_that_approvals_are_bound_to_never_changes(plan: Plan, digest: str) -> None:
    assert plan_digest(plan) == digest


def _tool(name: str, digest: str, **config: str) -> Tool:
    origin = Location("user", Path(f"/home/.ai/tools/{name}.yaml"), Path("/home/.ai/tools"), base=Path("/home/.ai"))
    return Tool(Manifest(name, "script", "1.0.0", config=config), origin, digest=digest)


def test_the_digest_of_a_chain_that_relaxations_and_rules_are_bound_to_never_changes() -> None:
    chain = Chain((_tool("t", "aa"), _tool("runtime", "bb")), (TypeTraits("process", "call"), TypeTraits()))
    assert chain_digest(chain) == "41466e474783829a4330ca6a78574a5ddd514079a189ffdd703c6d979b58f884"


def test_the_digest_of_an_accepted_definition_never_changes() -> None:
    listing = ServerListing(
        {},
        "2025-06-18",
        "legacy",
        tools=({"name": "read", "description": "Reads", "inputSchema": {"type": "object"}},),
        prompts=({"name": "ask"},),
        resources=({"uri": "file:///a", "name": "a"},),
        templates=({"uriTemplate": "file:///{name}", "name": "any"},),
    )
    issues: list[Issue] = []
    offers = offers_of("files", listing, issues)
    assert not issues
    assert {offer.kind: offer.digest for offer in offers} == {
        "tool": "eebf4502f40e3d302d2b0c03fe033f713710064a01a6bc80af20927257790b84",
        "prompt": "4324ae4b80b2c7844f73d09c9346ae06d8f33dee6290f65d5065a5cc95009c5b",
        "resource": "28afdb9f626b94295aa2f23b93a6a227fbb5dc24523e30e1533e4c2152fea8f4",
        "template": "bdfcded971dbdae7350d7999ead324a019f2246916857aedd3033bc7d850b3fb",
    }


def test_the_hash_of_a_receipt_never_changes() -> None:
    receipt = Receipt(
        "01ARZ3NDEKTSV4RRFFQ69G5FAV", "2026-01-01T00:00:00.000Z", "ada", "cli", "run", "t", "success", "standard",
        identity="project/local/t@1.0.0", digest="aa", plan_digest="bb", verdict="allow", arguments_sha256="cc",
        outcome_sha256="dd", duration_ms=5, cost_micros=0, detail='{"rule_id":"R"}',
    )  # fmt: skip
    said = [getattr(receipt, name) for name in Receipt.__struct_fields__]
    assert KIND == b"kiwi-receipt-v1\0"
    assert seal(1, said, "-") == "5a153cf8a493c1ea436ec1ba4ec326ccef01099a50cd8891055517d9652ac2cb"


@pytest.mark.parametrize(
    ("verb", "payload", "action"),
    [
        ("execute", {}, "run"),
        ("execute", {"action": "create"}, "create"),
        ("execute", {"action": "sign"}, "sign"),
        ("execute", {"action": "publish"}, "publish"),
        ("execute", {"action": "pull"}, "pull"),
        ("execute", {"action": "delete"}, "delete"),
        ("execute", {"action": "why"}, ""),
        ("load", {}, "load"),
        ("load", {"destination": "user"}, "copy"),
        ("search", {}, "search"),
        ("migrate", {"apply": True}, "migrate"),
        ("mcp", {"action": "add"}, "mcp add"),
        ("mcp", {"action": "accept"}, "mcp accept"),
        ("key", {"action": "new"}, "key new"),
        ("key", {"action": "rotate"}, "key rotate"),
        ("relax", {"action": "apply"}, "relax apply"),
        ("approvals", {"action": "approve"}, "approvals approve"),
        ("approvals", {"action": "add_rule"}, "approvals add_rule"),
        ("secrets", {"action": "set"}, "secrets set"),
        ("undo", {"action": "apply"}, "undo apply"),
        ("registry", {"action": "push"}, "registry push"),
        ("init", {}, "init"),
    ],
)
def test_the_action_of_a_receipt_never_changes(verb: str, payload: JsonObject, action: str) -> None:
    assert recorder.action_of(verb, find_verb(verb, payload), payload) == action


def test_the_files_of_the_audit_log_end_stay_in_place() -> None:
    assert (recorder.FILE, recorder.KEY) == ("state/audit.head", "state/audit.key")


async def _stored_secret(folder: Path, key: bytes) -> None:
    await SecretStore(folder, lambda: key).put("TOKEN", Secret("s"), SecretScope())


async def test_the_record_of_a_stored_secret_is_bound_to_its_name_and_version(tmp_path: Path) -> None:
    key = bytes(range(32))
    await _stored_secret(tmp_path, key)
    assert EncryptedRecords(tmp_path, lambda: key).read("list") is not None
    assert EncryptedRecords(tmp_path, lambda: key).read("secret TOKEN 1") is not None


@pytest.mark.parametrize(
    ("action", "resource"),
    [("run", "execute.run"), ("create", "execute.create"), ("publish", "execute.publish"), ("pull", "execute.pull")],
)
async def test_the_name_of_an_action_in_the_rules_of_a_policy_never_changes(
    tmp_path: Path, action: str, resource: str
) -> None:
    (tmp_path / "policy.yaml").write_text(f"verbs:\n  deny: [{resource}]\n")
    answer = await Kernel(tmp_path, user=tmp_path, cache=tmp_path).call("execute", {"action": action, "item_id": "t"})
    assert answer.content["code"] == "not_permitted"


def test_an_encrypted_record_is_bound_to_its_name(tmp_path: Path) -> None:
    key = bytes(range(32))
    folder = tmp_path / "records"
    folder.mkdir()
    EncryptedRecords(folder, lambda: key).write("list", EncryptedRecord({"a": 1}, {"value": Secret("s")}))
    (file,) = folder.iterdir()
    data = file.read_bytes()
    assert data.startswith(b"kiwi sealed 1\n")
    nonce, sealed = data[14:26], data[26:]
    assert AESGCM(key).decrypt(nonce, sealed, b"list") == b'{"facts":{"a":1},"secrets":{"value":"s"}}'
