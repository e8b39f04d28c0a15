"""Pooling over windows, and its gradient."""
