"""What a hook talks to: the ranks and their collectives, what came of these, and who watches them."""
