"""The process driver: a tool's files and its runtime's words become one process, and what it says a result."""

from kiwi_mcp.drivers.process.drive import Process

driver = Process()
