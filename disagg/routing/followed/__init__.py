"""Caches that are known by their KV events alone."""
