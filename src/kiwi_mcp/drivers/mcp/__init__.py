"""The MCP driver: a tool, a prompt or a resource of an MCP server becomes one request on a connection that is kept."""

from kiwi_mcp.drivers.mcp.drive import Mcp

driver = Mcp()
