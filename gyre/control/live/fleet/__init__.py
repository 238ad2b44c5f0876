"""The processes of a run: where they run, how they start, who watches them, and what outlives whom."""
