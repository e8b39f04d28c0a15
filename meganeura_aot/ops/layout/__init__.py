"""Reshape, permute, slice, concat, pad and upsample, and their gradients."""
