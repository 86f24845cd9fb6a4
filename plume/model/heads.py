"""What is put on top of the stack: next token, masked token, next sentence, classify, choose, similarity, tag, span."""

# B batch, T tokens, C choices, D model width, V vocabulary, L labels

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plume.config import ModelConfig, UserError, did_you_mean
from plume.model.lstm import Recurrent
from plume.model.ragged import PrefixTree, Ragged
from plume.model.transformer import Activation, EncoderDecoder, Transformer, initialise


class Summary(nn.Module):
    """One vector for a whole text: the last token as it is, or the first through a dense layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.last = config.summary == "last"
        self.dense = None if self.last else nn.Linear(config.width, config.width)
        self.activation = torch.tanh if config.summary == "tanh" else torch.relu

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        if self.dense is not None:
            return self.activation(self.dense(hidden[:, 0]))  # (B, D)
        if lengths is None:
            return hidden[:, -1]
        return hidden[torch.arange(hidden.shape[0], device=hidden.device), lengths - 1]


def mean_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The mean over the real tokens of each text."""
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]  # (B, T)
    return (hidden * real[:, :, None]).sum(dim=1) / lengths[:, None]  # (B, D)


def max_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The largest of each number over the real tokens of each text."""
    real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]  # (B, T)
    return hidden.masked_fill(~real[:, :, None], -torch.inf).amax(dim=1)  # (B, D)


def output_table(config: ModelConfig) -> nn.Linear | None:
    """The output weights where they are not tied to the token table."""
    return None if config.tie_embeddings else nn.Linear(config.width, config.table_rows, bias=False)


class NextToken(nn.Module):
    """The token table transposed, or output weights of its own."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        self.output = output_table(config)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return F.linear(hidden, table[: self.vocab_size])  # (..., V)


class MaskedToken(nn.Module):
    """A dense layer and a norm before the token table, and a bias per token after it."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width)
        self.activation = Activation(config)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.output = output_table(config)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        x = self.norm(self.activation(self.dense(hidden)))
        return F.linear(x, table[: len(self.bias)], self.bias)  # (..., V)


class Pretraining(nn.Module):
    """BERT's two tasks: the masked tokens, and whether the second segment follows the first."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.token = MaskedToken(config, labels)
        self.summary = Summary(config)
        self.next_sentence = nn.Linear(config.width, 2)

    def forward(self, hidden: Tensor, table: Tensor) -> Tensor:
        return self.token(hidden, table)  # (..., V)

    def follows(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.next_sentence(self.summary(hidden, lengths))  # (B, 2)


class Classify(nn.Module):
    """A label, or a number, for a whole text. Summaries may be added up before `score` (similarity in both orders)."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.summary = Summary(config)
        self.drop = nn.Dropout(config.dropout)
        self.out = nn.Linear(config.width, labels, bias=config.summary != "last")

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.score(self.summary(hidden, lengths))  # (B, L)

    def score(self, summary: Tensor) -> Tensor:
        return self.out(self.drop(summary))


class Choose(nn.Module):
    """One number per candidate; the candidates of an item stand in neighbouring rows."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.summary = Summary(config)
        self.drop = nn.Dropout(config.dropout)
        self.out = nn.Linear(config.width, 1)

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.out(self.drop(self.summary(hidden, lengths))).squeeze(-1)  # (B * C,)


class Tag(nn.Module):
    """A label per token."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(config.dropout)
        self.out = nn.Linear(config.width, labels)

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.out(self.drop(hidden))  # (B, T, L)


class Span(nn.Module):
    """Where an answer starts and where it ends."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.out = nn.Linear(config.width, 2)

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.out(hidden)  # (B, T, 2)


class Bare(nn.Module):
    """No task: hidden states as they are, with the summary where the family has a trained one."""

    def __init__(self, config: ModelConfig, labels: int) -> None:
        super().__init__()
        self.summary = Summary(config) if config.summary == "tanh" else None

    def forward(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        return hidden  # (B, T, D)


HEADS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "bare": Bare,
    "next-token": NextToken,
    "masked-token": MaskedToken,
    "pretraining": Pretraining,
    "classify": Classify,
    "similarity": Classify,
    "choose": Choose,
    "tag": Tag,
    "span": Span,
}
TOKEN_HEADS = ("next-token", "masked-token", "pretraining")  # these read the token table


class Model(nn.Module):
    """A stack and a head. `labels` are the names a classifier or tagger answers with."""

    def __init__(self, config: ModelConfig, head: str = "next-token", labels: Sequence[str] = ()) -> None:
        super().__init__()
        if head not in HEADS:
            raise UserError(f"there is no head {head!r}; all: {', '.join(HEADS)}{did_you_mean(head, HEADS)}")
        self.config, self.kind, self.labels = config, head, tuple(labels)
        self.body: Transformer | EncoderDecoder
        stack = Recurrent if config.recurrent else Transformer
        self.body = EncoderDecoder(config) if config.decoder_layers else stack(config)
        self.head = HEADS[head](config, len(self.labels))
        initialise(self.head, config)

    @property
    def table(self) -> Tensor:
        """The output weights: the token table where they are tied."""
        head = self.head.token if isinstance(self.head, Pretraining) else self.head
        output = head.output if isinstance(head, NextToken | MaskedToken) else None
        return self.body.embed.tokens.weight if output is None else output.weight  # (rows, D)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Without dropout for a while; a model in training is back in training afterwards."""
        training = [part for part in self.modules() if part.training] if self.training else []
        try:
            for part in training:
                part.training = False
            yield
        finally:
            for part in training:
                part.training = True

    def forward(
        self,
        tokens: Tensor,
        target: Tensor | None = None,
        *,
        segments: Tensor | None = None,
        lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """What the head says of every token, text or candidate. An encoder-decoder also takes the target so far."""
        if isinstance(self.body, EncoderDecoder):
            assert target is not None, "an encoder-decoder needs the target so far"
            hidden = self.body(tokens, target, source_lengths=lengths, lengths=target_lengths)
        else:
            hidden = self.body(tokens, segments=segments, lengths=lengths)
        return self.read(hidden, lengths)

    def read_ragged(self, trees: Sequence[PrefixTree]) -> Tensor:
        """Hidden states where the trees want them, (A, D), without padding."""
        assert isinstance(self.body, Transformer), "an encoder-decoder reads two sequences"
        return self.body.read_ragged(Ragged(trees, causal=self.body.causal, device=self.table.device))

    def read(self, hidden: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The head's output for hidden states."""
        if self.kind in TOKEN_HEADS:
            return self.head(hidden, self.table)
        return self.head(hidden, lengths)
