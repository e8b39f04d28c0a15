"""Pointwise operators: the table of them, their gradients, and steps in the store of another kernel."""
