"""`pointsman simulate`: policies side by side on the same requests, in virtual time."""
