"""`pointsman what-if`: `recorded_traffic` turns a log into a workload, `calibration` fits the engines, `runs`
simulates, `comparison` formats."""
