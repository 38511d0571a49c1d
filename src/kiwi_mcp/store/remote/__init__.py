"""Registries elsewhere: an OCI image layout, on disk or over HTTP."""
