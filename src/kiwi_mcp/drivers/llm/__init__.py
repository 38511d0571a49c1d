"""Models: providers are data, a dialect is one file, and a request to a model is a plan like any other."""
