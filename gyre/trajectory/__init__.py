"""The trajectory tree of an execution: which tokens a call continues, and who made it. Pure: no I/O, no clock.

Reading order: history (is this a turn we know?) → node, paths, call, checks, tree (prepare, commit, records) → roles.
"""
