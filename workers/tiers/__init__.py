"""Stores of whole KV blocks outside the pool: host memory, local disk, object stores."""
