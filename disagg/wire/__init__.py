"""Codecs between the core's dataclasses and the wire messages."""
