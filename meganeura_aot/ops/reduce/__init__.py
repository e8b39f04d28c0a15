"""Reductions, softmax, sorting, and how threads share rows."""
