"""Predictions of runs.

Constants from a trace, predictions compared with runs, predictions of many ranks from few, and
programs recovered from traces, which can run again.
"""
