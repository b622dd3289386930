"""A checking process of the Triton interpreter imports this: it makes the interpreter quick."""

from tests.backends.triton.interpreter import quicken

quicken()
