"""Where engines come from (`ports.InstanceProvider`): processes, containers, pods, or operators."""
