"""Benchmark scripts, each of which writes its own results to docs/."""
