"""`pointsman doctor`: `examination` folds the log once and passes each entry to the examiners, which return
`findings`."""
