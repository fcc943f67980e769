"""Measures links: the cost of sending a message between two ranks and around the ring."""
