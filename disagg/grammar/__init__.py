"""Grammars that answers must match, compiled for a checkpoint's tokens."""
