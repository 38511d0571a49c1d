"""Threads: the agent loop over a journal."""
