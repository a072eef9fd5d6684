"""What single policies remember, one file each. Policies name their trackers (`RoutingPolicy.trackers`), State updates
them, decisions only read them."""
