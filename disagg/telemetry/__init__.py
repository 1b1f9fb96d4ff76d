"""Traces and logs of router and workers alike."""
