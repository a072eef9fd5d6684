"""What single policies remember: one file a memory, folded by State like everything else.

A policy that needs to remember makes its memory (`RoutingPolicy.trackers`, `OrderingPolicy.trackers`) and State feeds
it; deciding only reads it. A memory that no chosen policy asks for is not kept.
"""
