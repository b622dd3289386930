"""Drop-in losses for libraries that people already train with; each is imported when asked for."""
