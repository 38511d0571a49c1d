"""`python -m kiwi_mcp`: the same command as `kiwi`."""

from kiwi_mcp.surfaces.start import command

command()
