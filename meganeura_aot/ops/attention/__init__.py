"""Attention, its gradient, its schedules, caches of keys and values, and rotary positions."""
