"""Normalisation over rows, groups and batches, its gradients and its schedules."""
