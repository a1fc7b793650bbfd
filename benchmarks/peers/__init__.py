"""Other people's own code, run on our tensors. Nothing of theirs is in this repository."""
