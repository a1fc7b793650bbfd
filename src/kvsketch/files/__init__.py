"""Compressed documents on disk."""
