"""The real controller under a virtual clock, with synthetic executions and cells."""
