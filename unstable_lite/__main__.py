"""`python -m unstable_lite`."""

from unstable_lite.cli.app import main

main()
