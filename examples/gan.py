"""The model of gan.yaml: a small DCGAN (Radford et al. 2015, arXiv:1511.06434) for images of 8 x 8 pixels."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits


class Gan(nn.Module):
    """A generator and a discriminator. Images have the shape (batch, 1, 8, 8), with values from 0 to 1."""

    def __init__(self, noise: int = 16, channels: int = 32) -> None:
        super().__init__()
        self.noise = noise
        self.generator = nn.Sequential(
            nn.Linear(noise, 4 * channels * 4),
            nn.Unflatten(1, (4 * channels, 2, 2)),
            nn.BatchNorm2d(4 * channels),
            nn.ReLU(),
            nn.ConvTranspose2d(4 * channels, 2 * channels, 4, stride=2, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.ConvTranspose2d(2 * channels, 1, 4, stride=2, padding=1),
            nn.Sigmoid(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(1, channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(channels, 2 * channels, 4, stride=2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4, 1),
        )

    def generate(self, count: int) -> Tensor:
        """New images, shape (count, 1, 8, 8)."""
        device = next(self.generator.parameters()).device
        return self.generator(torch.randn(count, self.noise, device=device))

    def forward(self, images: Tensor, label: Tensor, turn: str = "generator") -> dict[str, Tensor]:
        """The loss of a turn; the labels are not used."""
        fakes = self.generate(len(images))
        if turn == "generator":  # it falls as the discriminator takes more fakes for images
            of_fakes = self.discriminator(fakes)
            return {"loss": binary_cross_entropy_with_logits(of_fakes, torch.ones_like(of_fakes))}
        logits = self.discriminator(torch.cat([images, fakes.detach()]))
        of_images, of_fakes = logits.chunk(2)
        wanted = torch.cat([torch.ones_like(of_images), torch.zeros_like(of_fakes)])
        return {
            "loss": binary_cross_entropy_with_logits(logits, wanted),
            "real": of_images.sigmoid().mean(),  # curves in the report: what it believes of images
            "fake": of_fakes.sigmoid().mean(),  # and of fakes
        }
