"""Two tiers: what takes long, or needs a PostgreSQL, runs in the full one."""

from __future__ import annotations

import pytest

SLOW = frozenset(
    {
        "docs/test_pages.py",
        "drivers/mcp/test_bad_servers.py",
        "drivers/mcp/test_network.py",
        "drivers/mcp/test_notes.py",
        "drivers/mcp/test_pool.py",
        "drivers/mcp/test_questions.py",
        "drivers/mcp/test_tasks.py",
        "drivers/process/test_jail.py",
        "drivers/process/test_syntax.py",
        "faults/test_approvals.py",
        "faults/test_kills.py",
        "faults/test_loss.py",
        "faults/test_malice.py",
        "faults/test_outages.py",
        "kernel/checkpoints/test_copies.py",
        "kernel/checkpoints/test_git.py",
        "kernel/checkpoints/test_modes.py",
        "kernel/checkpoints/test_undo.py",
        "kernel/mcp/test_login.py",
        "kernel/mcp/test_servers.py",
        "kernel/mcp/test_taking_over.py",
        "kernel/test_imports.py",
        "kernel/test_migrate.py",
        "kernel/test_offers.py",
        "kernel/test_receipts.py",
        "kernel/test_store_concurrency.py",
        "kernel/test_wide.py",
        "primitives/test_peer.py",
        "primitives/test_vault.py",
        "properties/test_an_approval_is_for_one_plan.py",
        "properties/test_the_kernel_always_answers.py",
        "security/test_collecting.py",
        "security/test_parsers.py",
        "security/test_running_tools.py",
        "store/test_receipts.py",
        "stories/test_apis.py",
        "stories/test_context.py",
        "stories/test_floors.py",
        "stories/test_isolation.py",
        "stories/test_lifecycle.py",
        "stories/test_mcp_servers.py",
        "stories/test_mechanisms.py",
        "stories/test_placements.py",
        "stories/test_seed_manifests.py",
        "stories/test_sharing.py",
        "stories/test_tenants.py",
        "surfaces/cli/test_approvals.py",
        "surfaces/cli/test_keys.py",
        "surfaces/cli/test_process.py",
        "surfaces/cli/test_registry.py",
        "surfaces/gateway/test_access.py",
        "surfaces/gateway/test_approvals.py",
        "surfaces/gateway/test_door.py",
        "surfaces/gateway/test_mcp.py",
        "surfaces/gateway/test_mcp_door.py",
        "surfaces/gateway/test_rights.py",
        "surfaces/gateway/test_sessions.py",
        "surfaces/gateway/test_up.py",
        "surfaces/mcp/test_approvals.py",
        "surfaces/mcp/test_calls.py",
        "surfaces/mcp/test_changes.py",
        "surfaces/mcp/test_known_tools.py",
        "surfaces/mcp/test_lean.py",
        "surfaces/mcp/test_offered.py",
        "surfaces/mcp/test_process.py",
    }
)
"""Files below `tests` whose tests start many processes and servers, or try very many inputs."""

SANDBOXED = "sandbox/"
"""The folder whose tests need bubblewrap."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what belongs in the full tier; SQLite stands for both stores in the fast one."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        # A parameter is the kind of a store, or several kinds.
        kinds = [kind for kind in callspec.params.values() if isinstance(kind, str | tuple)] if callspec else []
        path = item.path.relative_to(config.rootpath / "tests").as_posix()
        is_slow = path in SLOW or path.startswith(SANDBOXED)
        is_on_postgres = "postgres_server" in getattr(item, "fixturenames", ())
        if is_slow or is_on_postgres or any("postgres" in kind for kind in kinds):
            item.add_marker(pytest.mark.full)
