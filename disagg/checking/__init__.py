"""The explorer: everything that can happen in small worlds (core only)."""
