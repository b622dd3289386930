"""python -m fastsim."""

from fastsim.cli.main import main

main(prog_name="fastsim")
