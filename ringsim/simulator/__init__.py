"""Runs the same workers, schedules and links on a virtual clock."""
