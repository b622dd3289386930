"""Embeddings by hand."""

import torch


class Angles:
    """An encoder of texts that are angles in degrees: the closer the nearer. A prompt turns them.

    Prompts are numbers too; `asked` holds what was encoded with which.
    """

    dim = 2
    similarity = "cosine"

    def __init__(self, **prompts):
        self.prompts, self.asked = prompts, []

    def prompt_of_column(self, name):
        return self.prompts.get(name, "0")

    def encode(self, texts, *, prompt="0", **options):
        self.asked += [(prompt, text) for text in texts]
        angles = torch.tensor([float(prompt) + float(text) for text in texts]).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], 1)

    def encode_query(self, texts, **options):
        return self.encode(texts, prompt=self.prompts.get("query", "0"))

    def encode_document(self, texts, **options):
        return self.encode(texts, prompt=self.prompts.get("document", "0"))


class Points(Angles):
    """An encoder of texts that are points "x,y"."""

    def encode(self, texts, **options):
        return torch.tensor([[float(number) for number in text.split(",")] for text in texts])
