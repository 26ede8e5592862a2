"""A study: the same runs for every arm and seed, with one measure named before they start, and its tables and plots.

`reading.py` reads the file, `running.py` has the processes, `results.py` the JSON, `statistics.py` the aggregates,
`page.py` the outputs, and `command.py` joins them.
"""
