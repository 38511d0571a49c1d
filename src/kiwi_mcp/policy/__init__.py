"""May this plan go ahead."""
