"""Triton's interpreter without what takes most of a test's time and shows nothing here, and with
products as a GPU makes them.
"""

import dataclasses

import numpy as np


def adjust(change=setattr):
    """For this process; change: such as `setattr` of pytest's monkeypatch."""
    from triton.runtime import interpreter

    change(interpreter.ReduceOps, "generic_reduce", reduce_slices)
    change(interpreter.ScanOps, "generic_scan", scan_slices)
    change(interpreter, "_patch_lang", patched_once(interpreter))
    change(interpreter, "_patch_lang_tensor", with_numbers(interpreter))
    # Additions of integers far below 2^31 are not done again in 64 bits.
    options = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    change(interpreter.interpreter_builder, "options", options)
    change(interpreter.InterpreterBuilder, "create_dot", product_in_one_order(interpreter))


def with_numbers(interpreter):
    """A tensor of one element is a number, also with Triton 3.6, whose numpy was older."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def product_in_one_order(interpreter):
    """Products of tiles where equal rows and columns have equal scores, wherever they lie.

    A matrix unit adds up every place of a tile in one order. A library of numpy's does not on every
    processor; sums in float64 are rounded to the same number.
    """
    create_dot = interpreter.InterpreterBuilder.create_dot

    def product(self, a, b, added, *more):
        if a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
            return create_dot(self, a, b, added, *more)
        sums = np.matmul(a.data, b.data, dtype=np.float64).astype(added.data.dtype)
        return interpreter.TensorHandle(sums + added.data, added.dtype.scalar)

    return product


def reduce_slices(self, values):
    """Joins whole slices, in the interpreter's order, which takes one number after the other."""
    (value,) = values
    data, axis = value.handle.data, self.axis
    found = self.to_tensor(data.take(0, axis), value.dtype)
    for place in range(1, data.shape[axis]):
        found = self.combine_fn.fn(found, self.to_tensor(data.take(place, axis), value.dtype))
    return [found]


def scan_slices(self, values):
    """In each step joins every number with that 1, 2, 4, ... places before it, as a GPU does."""
    data = [np.moveaxis(value.handle.data, self.axis, 0).copy() for value in values]
    dtypes, step = [value.dtype for value in values], 1

    def tensors(parts):
        return [self.to_tensor(part, dtype) for part, dtype in zip(parts, dtypes, strict=True)]

    while step < len(data[0]):
        before = [np.roll(part, step, 0) for part in data]
        joined = self.combine_fn.fn(*tensors(before), *tensors(data))
        for part, one in zip(data, joined if isinstance(joined, tuple) else (joined,), strict=True):
            part[step:] = one.handle.data[step:]
        step *= 2
    return tensors([np.moveaxis(part, 0, self.axis) for part in data])


def patched_once(interpreter):
    """Puts the interpreter's functions in the place of Triton's language once a launch.

    The interpreter does so again at every call of one function by another, which changes nothing.
    """
    import triton.language as tl

    patch_language = interpreter._patch_lang

    def patch(function):
        visible = function.__globals__.values()
        languages = [module for module in (tl, tl.core) if any(module is one for one in visible)]
        if any(tl.core.is_builtin(module.load) for module in languages):
            return patch_language(function)
        return interpreter._LangPatchScope()

    return patch
