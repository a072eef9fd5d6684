"""`pointsman-lab elasticity`: how a fleet of real processes scales under a load that doubles and halves."""
