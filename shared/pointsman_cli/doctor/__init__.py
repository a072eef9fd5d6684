"""`pointsman doctor`: `examination` folds the log once and shows every entry to the examiners, one module each; they return
`findings`. What an examiner keeps is bounded, whatever the length of the log."""
