"""open_clip's own losses, from the module that ours are subclasses of."""


def load():
    """The module, or None where open_clip_torch is not installed."""
    try:
        from fastsim.integrations.open_clip import peer

        return peer.losses()
    except ImportError:
        return None
