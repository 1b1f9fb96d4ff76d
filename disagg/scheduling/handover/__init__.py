"""The hand-over by side: prefill, decode, and the pull of a cached prefix."""
