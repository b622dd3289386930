"""The backend in plain torch operations."""
