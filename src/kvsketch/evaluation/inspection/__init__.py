"""Inspection of one model: errors, norms and clusters of its keys and values."""
