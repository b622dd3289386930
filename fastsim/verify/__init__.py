"""Checks whether the kernels are correct on this device: `fastsim verify`.

    cases.py      the losses of each kind, on inputs that are hard for kernels
    checks.py     compares one backend, kind and dtype with float64 and with the torch backend
    child.py      runs such a check in a process of its own, which may crash or hang
    process.py    starts these processes, several at a time, and collects their results
    run.py        turns the results into verdicts
    verdicts.py   keeps verdicts as files in the user's cache, and chooses kernels for `auto`

`auto` never takes a kernel unless a verdict of this device says that it is correct.
"""
