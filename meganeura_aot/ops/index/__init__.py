"""Gather and scatter."""
