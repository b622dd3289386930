"""Training of encoders: data, batches, objectives, trainer, evaluation, pictures.

The modules that use heavy packages (transformers, datasets, matplotlib) import them.
"""
