"""open_clip's training step with its losses swapped: images and texts that belong together."""

import torch

# was: from open_clip.loss import ClipLoss
from fastsim.integrations.open_clip import ClipLoss


class Towers(torch.nn.Module):
    """What open_clip.create_model returns, in small: features of unit length and a scale."""

    def __init__(self, image_width, text_width, width=64):
        super().__init__()
        self.image = torch.nn.Linear(image_width, width)
        self.text = torch.nn.Linear(text_width, width)
        self.logit_scale = torch.nn.Parameter(torch.tensor(1 / 0.07).log())

    def forward(self, images, texts):
        return {
            "image_features": torch.nn.functional.normalize(self.image(images), dim=-1),
            "text_features": torch.nn.functional.normalize(self.text(texts), dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }


def main(steps=30):
    """The losses of the steps."""
    torch.manual_seed(0)
    model, loss = Towers(48, 32), ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    both = torch.randn(512, 16)  # what an image and its text have in common
    images, texts = both @ torch.randn(16, 48), both @ torch.randn(16, 32)
    seen = []
    for _ in range(steps):
        batch = torch.randint(len(both), (128,))
        value = loss(**model(images[batch], texts[batch]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seen.append(value.item())
    return seen


if __name__ == "__main__":
    print(main())
