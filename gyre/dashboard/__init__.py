"""Web pages, pictures and metrics of a run, from its run directory alone: never from live objects.

Whatever a run directory holds may have been written by a hostile harness or task, so nothing of it reaches a page
unescaped. `gyre inspect` and the report of `gyre train` print the same tables and facts.
"""
