"""Predicts runs.

The modules measure constants from traces, compare predictions with runs, predict many ranks from a
few, and recover programs from traces, so that they can run again.
"""
