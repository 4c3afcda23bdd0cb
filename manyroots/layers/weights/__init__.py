"""How the numbers of a product are kept, filled from a checkpoint and cut for a rank."""
