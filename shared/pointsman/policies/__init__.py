"""What we decide: pure functions from a view of the state, `now` and a seed to a choice with its reasons. `heard_reports`,
`clock_offsets` and `lost_requests` hold what a leader knows beside the log, for one term."""
