"""Text encoders and cross-encoders, and the files of their models."""
