"""What a block multiplies: its rows of A, B and the mask, and a B that stays in memory."""
