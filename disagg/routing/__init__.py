"""The router's decisions, without I/O: prefix index, fleet, policy, life of a request."""
