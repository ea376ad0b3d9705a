"""A sequence tagger: embedding, two-layer bidirectional LSTM, one score per token and tag."""

import torch
from torch import Tensor, nn


class LSTMTagger(nn.Module):
    """Scores of every tag for every token of a batch of sentences."""

    def __init__(
        self, vocabulary: int = 20_000, tags: int = 17, width: int = 256, hidden: int = 512
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.scores = nn.Linear(2 * hidden, tags)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.scores(states)


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The tagger and 32 sentences of 48 tokens."""
    return LSTMTagger(), (torch.randint(0, 20_000, (32, 48)),)
