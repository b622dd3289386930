"""Whether the kernels are right on the device at hand: `fastsim verify`.

    cases.py      the losses of each kind, on inputs that kernels go wrong on
    checks.py     one backend, kind and dtype against float64 and against the torch backend
    child.py      the same in a process of its own, which may crash or hang
    process.py    starts such processes, several at once, and says what became of them
    run.py        turns that into verdicts
    verdicts.py   verdicts as files in the user's cache, and what `auto` makes of them

A kernel that no verdict of this device calls right is never taken by `auto`.
"""
