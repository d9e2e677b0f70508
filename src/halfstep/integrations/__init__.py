"""halfstep inside the frameworks people train with: each module needs its framework, and is imported by name."""
