"""Updates of parameters."""
