"""The engine model, and later the whole system in virtual time."""
