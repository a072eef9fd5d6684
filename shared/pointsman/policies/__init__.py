"""What we decide: pure functions from a view of the state, `now` and a seed to a choice with its reasons."""
