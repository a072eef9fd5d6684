"""Recorded logs: `sources` opens them (`live`, `archive`, `bundle`) for `replay`, `state` and `export`."""
