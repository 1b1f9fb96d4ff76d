"""Ray placement and supervision; `disagg serve` as an object."""
