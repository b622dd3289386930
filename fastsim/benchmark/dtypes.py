"""The names of `--dtype`: in which numbers embeddings are, and are multiplied."""

AUTOCAST = "autocast"  # float32 embeddings, the loss in a context of torch.autocast to bfloat16
DTYPES = ("float32", "float16", "bfloat16", "float64", AUTOCAST)
