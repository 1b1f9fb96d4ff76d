"""Tiers as holders of blocks: what they have, what is written to them and read from them."""
