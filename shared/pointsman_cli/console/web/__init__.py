"""HTTP: pages, API, live streams, and who may use them."""
