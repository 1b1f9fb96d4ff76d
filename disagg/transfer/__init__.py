"""The lease protocol: state machines of owner and reader, without I/O or clock."""
