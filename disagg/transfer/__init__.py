"""The transfer protocol: leases, inbound transfers, reservations; sans-IO."""
