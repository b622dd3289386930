"""A checking process imports this: it makes the fakes known there."""

from fastsim.backends import register
from tests.verify import fakes

for backend in (
    *(fakes.Fake(), fakes.Lying(), fakes.Hanging(), fakes.Crashing(), fakes.Raising()),
    *(fakes.Wavering(), fakes.Spilling(), fakes.Deaf(), fakes.Bare()),
):
    register(backend)
