"""State of one pool: the fold of its log. Only `State.apply(event)` changes it. The names of modules, classes and
attributes here are the format of checkpoints."""
