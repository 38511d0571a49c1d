"""Where items are found, and the chain each stands on."""
