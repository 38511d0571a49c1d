"""Surfaces: the CLI, the MCP server and the gateway. They translate requests and answers."""
