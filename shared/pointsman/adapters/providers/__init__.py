"""Where engines come from: local processes, containers, pods, or people (`ports.InstanceProvider`).

Clients of Docker and of Kubernetes are imported only when such a provider is made; they come with the extras
`pointsman[docker]` and `pointsman[kubernetes]`.
"""
