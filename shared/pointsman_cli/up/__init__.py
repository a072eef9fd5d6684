"""`pointsman up`: `settings` is the input, `plan` and `processes` are pure, `session` runs the fleet."""
