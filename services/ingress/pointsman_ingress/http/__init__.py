"""HTTP exchange with clients: bodies, headers, API keys, deadlines, errors."""
