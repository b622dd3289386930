"""A checking process of the Triton interpreter imports this: it adjusts the interpreter first."""

from tests.backends.triton.interpreter import adjust

adjust()
