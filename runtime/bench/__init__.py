"""Benchmarks that come with the command line."""
