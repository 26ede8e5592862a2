"""Helper modules of the tests: fake and faulty peers, models, runs and reference computations."""
