"""Tools that show the protocol right: explorer and small worlds (core only)."""
