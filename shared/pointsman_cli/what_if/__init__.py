"""`pointsman what-if`: `recorded_traffic` reads the log, `calibration` fits the engines, `runs` simulates."""
