"""Reads one log and keeps what the pages show of it."""
