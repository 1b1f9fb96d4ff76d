"""Kinds of KV cache groups, a file each; see the README."""
