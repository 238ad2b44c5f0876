"""Paths inside every sandbox that its makers and the readers of tasks agree on."""

HOME = "/home/agent"
"""Of the harness."""
