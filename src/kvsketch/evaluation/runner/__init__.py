"""Cases through setups: what is run, where its results survive."""
