"""From a request body to tokens and block keys."""
