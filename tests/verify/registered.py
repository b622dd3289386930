"""A checking process imports this: it makes the fakes known there."""

from fastsim.backends import register
from tests.verify import fakes

for backend in fakes.ALL:
    register(backend)
