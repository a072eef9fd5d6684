"""`pointsman hit-rate`, and the metrics of the hit-rate ladder."""
