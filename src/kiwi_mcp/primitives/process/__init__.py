"""Processes: start, run, end."""
