"""Explains why a run stopped or was slow, from the posted operations of its ranks."""
