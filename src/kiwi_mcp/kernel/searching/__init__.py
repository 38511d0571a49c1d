"""Searching as the kernel does it: what is indexed of which catalog, and when."""
