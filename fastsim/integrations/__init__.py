"""Drop-in losses for other training libraries; each module imports its library."""
