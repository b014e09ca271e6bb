"""Built-in models: `mlp`, `cnn`, `transformer`."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


def mlp(*, inputs: int, hidden: Sequence[int], outputs: int, activation: str) -> nn.Module:
    """Linear layers with an activation between them: (batch, *), flattened, to (batch, outputs)."""
    widths = [inputs, *hidden, outputs]
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        if index:
            layers.append(ACTIVATIONS[activation]())
        layers.append(nn.Linear(fan_in, fan_out))
    return nn.Sequential(*layers)


def cnn(*, channels: Sequence[int], inputs: Sequence[int], outputs: int) -> nn.Module:
    """3x3 convolutions with BatchNorm and ReLU, an average over the image, a linear layer.

    Input: (batch, *inputs), inputs being (channels, height, width). Output: (batch, outputs). BatchNorm's
    running statistics make it the model whose buffers change.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([inputs[0], *channels]):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False), nn.BatchNorm2d(fan_out), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], outputs)]
    return nn.Sequential(*layers)


class Transformer(nn.Module):
    """A causal, pre-norm transformer that predicts the next token at each position.

    Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762), layer norms first as in GPT-2.
    Input: (batch, time) int64 tokens, time <= context. Output: (batch, vocabulary, time) logits: classes lie
    on dimension 1, where torch's cross_entropy wants them, for a target of (batch, time).
    """

    def __init__(
        self, *, vocabulary: int, width: int, layers: int, heads: int, context: int, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for weight in (self.token.weight, self.position):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:  # tokens: (batch, time)
        hidden = self.token(tokens) + self.position[: tokens.shape[1]]  # (batch, time, width)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))  # (batch, time, vocabulary)
        return logits.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm with a residual connection around it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        drop = self.dropout if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=True)
        hidden = hidden + self._drop(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return hidden + self._drop(self.feed_forward(hidden))

    def _drop(self, tensor: Tensor) -> Tensor:
        return nn.functional.dropout(tensor, self.dropout, self.training)


MODELS: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": Transformer}
