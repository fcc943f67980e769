"""Measures links: what a message costs between two ranks, and around the ring."""
