"""What turns environments, policies and world models into the `Task` that the core trains on."""
