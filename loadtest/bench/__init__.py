"""Benchmarks: each prints its table and writes ``loadtest/out/<target>/latest.json``."""
