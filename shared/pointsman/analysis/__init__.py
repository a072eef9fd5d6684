"""Questions put to a log while it is folded: events and State in, figures out. No I/O, no clock."""
