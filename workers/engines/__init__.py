"""What computes a worker's steps: the protocol, and one folder per engine."""
