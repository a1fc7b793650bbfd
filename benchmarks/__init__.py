"""Scripts that measure; each writes its own results into docs/."""
