"""The command line: data on stdout, talk on stderr."""
