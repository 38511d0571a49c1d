"""Checkpoints: what the owner's files were before a run, so that the run can be undone."""
