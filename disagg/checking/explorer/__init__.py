"""Every state that a small world of production objects can reach."""
