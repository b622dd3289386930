"""Whether the kernels are right on the device at hand: `fastsim verify`.

    cases.py      the losses of each kind, on inputs that kernels go wrong on
    checks.py     one backend, kind and dtype against float64 and against the torch backend
    child.py      the same in a process of its own, which may crash or hang
    run.py        starts these processes and turns what becomes of them into verdicts
    verdicts.py   verdicts as files in the user's cache, and what `auto` makes of them

A kernel that no verdict of this device calls right is never taken by `auto`.
"""
