"""The shared library: one fold over one log, and the pure policies that decide from it."""
