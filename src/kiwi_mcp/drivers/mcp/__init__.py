"""The MCP driver: a tool, a prompt or a resource of an MCP server becomes one request on a connection that is kept."""

from kiwi_mcp.drivers.mcp.driver import McpDriver

create_driver = McpDriver
