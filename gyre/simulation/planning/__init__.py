"""`gyre plan`: what a configuration means, and which settings on the same hardware would be faster.

config ──► world.py: executions of a recorded run or of a stated workload, one draw per seed
             │
           candidates.py: settings on the same devices, within a bound of staleness
             │
           search.py: simulates them, few seeds first, within a budget of seconds
             │
           report.py: sentences, the Pareto front as a table, a picture, JSON
"""
