"""Recorded logs: `sources` opens them (`live`, `archive`, `bundle`); `replay`, `state` and `export` are the commands."""
