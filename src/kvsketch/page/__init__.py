"""What a layer holds: slots of heads of any size, exact or in few bits, in memory of any owner."""
