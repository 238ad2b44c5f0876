"""What a run did, read from its run directory: summaries, timelines, tables and pictures."""
