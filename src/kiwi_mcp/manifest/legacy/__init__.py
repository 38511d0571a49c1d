"""Old manifests and their signatures."""
