"""`pointsman-lab hosts`: a fleet on several hosts, each a network namespace, over a network that delays and loses packets."""
