"""`python -m unstable_lite`."""

from unstable_lite.cli import main

main()
