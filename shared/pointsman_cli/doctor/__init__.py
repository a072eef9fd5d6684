"""`pointsman doctor`: `examination` passes each entry of a log to the examiners, which return `findings`."""
