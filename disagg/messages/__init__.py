"""Plain types that cross a wire, file by file opposite `proto/` and `disagg/wire/`."""
