"""What a sandbox may use, and what holds it to that."""
