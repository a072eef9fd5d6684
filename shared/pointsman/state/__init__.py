"""What we remember: the fold of the log. `State.apply(event)` is the only code that turns the log into state."""
