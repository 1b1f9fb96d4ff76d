"""The production cores at fleet size, in virtual time, with times that were measured."""
