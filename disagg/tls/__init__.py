"""Certificates of a cluster's own authority, and gRPC connections that both ends prove."""
