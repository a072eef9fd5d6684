"""`pointsman-lab faults`: kills processes of a real fleet under load; checks that no request is lost or duplicated."""
