"""The command line `fastsim`."""
