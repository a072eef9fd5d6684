"""Implementations of the protocols in `ports`."""
