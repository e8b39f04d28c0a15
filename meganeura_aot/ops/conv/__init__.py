"""Convolutions and transposed convolutions, their gradients and their schedules."""
