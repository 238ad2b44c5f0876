"""The session of one execution: its tree, its calls, and what they share."""
