"""A small encoder of numbers."""

import torch

WIDTH = 12


def encoder(dtype=torch.float64, dropout=0.3):
    """Layers whose embeddings depend on what dropout draws."""
    layers = [torch.nn.Linear(WIDTH, 24), torch.nn.Tanh(), torch.nn.Dropout(dropout)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(24, 10)).to(dtype)
