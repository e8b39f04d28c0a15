"""Matrix products and their schedules."""
