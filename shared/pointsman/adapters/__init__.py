"""How we get what `ports` asks for: real ways and, for tests and simulations, in-memory ones."""
