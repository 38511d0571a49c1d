"""MCP servers of other programs: read from their configurations, and Kiwi written into these."""

from kiwi_mcp.kernel.mcp.clients import Client, Configuration, clients, find_configurations
from kiwi_mcp.kernel.mcp.configurations import read_configuration
from kiwi_mcp.kernel.mcp.connect import Change, apply, plan_connect, plan_undo
from kiwi_mcp.kernel.mcp.drafts import Imported, ServerDraft
from kiwi_mcp.kernel.mcp.server_json import read_server_json

__all__ = [
    "Change",
    "Client",
    "Configuration",
    "Imported",
    "ServerDraft",
    "apply",
    "clients",
    "find_configurations",
    "plan_connect",
    "plan_undo",
    "read_configuration",
    "read_server_json",
]
