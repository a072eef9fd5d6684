"""State of one pool: the fold of its log. Only `State.apply(event)` changes it."""
