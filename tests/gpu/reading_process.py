"""READs between two processes with pools in device memory; UCX says in its log over what."""

from disagg.commands.measured_links import measure_links

BLOCK_BYTES = 256 << 10

if __name__ == "__main__":
    measure_links(BLOCK_BYTES, "cuda", 1 << 30, 1, print)
