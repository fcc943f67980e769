"""The virtual clock: the same workers, schedules and links, in simulated time."""
