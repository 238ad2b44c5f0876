"""An offline tool: recorded traffic of a harness replayed through the real session code."""
