"""Training of encoders: data, batches, objectives, trainer, evaluation, pictures.

Heavy packages (transformers, datasets, matplotlib) are imported by the modules that use them.
"""
