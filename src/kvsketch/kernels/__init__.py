"""Fast forms of attention over slots, each tested against ``slots.attend``."""
