"""The HTML of the console."""
