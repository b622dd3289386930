"""The choices of `--dtype`: the dtype of the embeddings and of their products."""

AUTOCAST = "autocast"  # float32 embeddings, and a loss under torch.autocast to bfloat16
DTYPES = ("float32", "float16", "bfloat16", "float64", AUTOCAST)
