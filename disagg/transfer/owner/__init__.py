"""The owner of leases: what it holds for readers, and how it answers them."""
