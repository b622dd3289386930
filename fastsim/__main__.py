"""python -m fastsim."""

from fastsim.cli import main

main(prog_name="fastsim")
