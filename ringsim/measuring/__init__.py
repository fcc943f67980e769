"""Link measurements: the cost of a message between two ranks, and around the ring."""
