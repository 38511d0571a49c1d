"""Secret values: where they come from, who may get them, how they are stored."""
