"""Adapters that run other authors' code on our tensors. None of that code is in this repository."""
