"""Leaves of a graph, and writes of states."""
