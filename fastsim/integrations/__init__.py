"""Drop-in losses for the libraries people already train with, each imported only when asked for."""
