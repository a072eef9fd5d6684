"""What single policies remember, one file each. A policy gives its trackers (`RoutingPolicy.trackers`, ...), State feeds
them, deciding only reads them.
"""
