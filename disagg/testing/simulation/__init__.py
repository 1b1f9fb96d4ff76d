"""Many seeds of a large world of production cores, with faults."""
