"""Verbs of the group `registry`."""
