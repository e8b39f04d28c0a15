"""Random graphs and random training models, made from a seed, against the reference: see docs/testing.md."""
