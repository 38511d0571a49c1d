"""The process driver: builds one process from a tool's files and its runtime's config, and a result from its output."""

from kiwi_mcp.drivers.process.driver import Process

create_driver = Process
