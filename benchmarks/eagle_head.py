r"""Train an EAGLE head for a Llama on the model's own answers; say how often it is right.

The head is one decoder layer over a token's embedding and the hidden state before it (EAGLE, Li et
al. 2024, figure 6), in the format that vLLM loads. `--data` takes text files, or answers as
`vllm-trie corpus synthesize` writes them. Each row is the share of held-out places where the head's
likeliest token is the model's, `depth` tokens ahead. `--minutes` ends the training early.

    vllm-trie corpus synthesize MODEL -o MODEL.corpus
    python benchmarks/eagle_head.py --model MODEL --data MODEL.corpus.answers.jsonl --out HEAD
    vllm serve MODEL --speculative-config \
        '{"method": "eagle", "model": "HEAD", "num_speculative_tokens": 4}'
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from support.harness import Row, add_model_option, option_parser, report
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from vllm_trie.extras.heads.training.backbone import Backbone
from vllm_trie.extras.heads.training.text import TokenRows, find_files, read_tokens, split_rows
from vllm_trie.extras.heads.training.trainer import learning_rate_factor
from vllm_trie.lab.tiny_model import model_path

COLUMNS = ("depth", "agreement", "steps", "minutes")
DEPTH = 4
"""Passes in training and in the table: from the second on the head reads its own hidden states."""
HIDDEN_WEIGHT = 0.2
FITTED_ROWS = 40
WARM_UP = 40
HELD = 0.05
"""Share of the rows that is held out."""


class EagleHead(nn.Module):
    """The hidden state of the next place, from its token and the hidden state before.

    Args:
        config: Of the model.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = nn.Identity()  # as in the format
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Return [rows, tokens, hidden_size], as both arguments are."""
        states = self.fc(torch.cat((embedded, hidden), -1))
        positions = torch.arange(states.shape[1])[None]
        made: Tensor = self.layer(
            states, position_ids=positions, position_embeddings=self.rotary(states, positions)
        )
        return made


class Training:
    """A head in training; the model stays as it is.

    Args:
        backbone: The model.
        learning_rate: Its peak.
        scored: Share of the places whose tokens are guessed: their logits are most of the work
            where the vocabulary is large.
    """

    def __init__(self, backbone: Backbone, learning_rate: float, scored: float) -> None:
        decoder = backbone.decoder
        self._backbone, self._scored = backbone, scored
        self._embedding = decoder.get_input_embeddings().weight.float()
        self.config = decoder.config
        self.head = EagleHead(self.config)
        self._learning_rate = learning_rate
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )

    def _truth(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the embedding of each token, and the model's hidden states, which autograd takes
        from outside of inference mode only."""
        tokens = torch.from_numpy(rows)
        return F.embedding(tokens, self._embedding), self._backbone.hidden_states(tokens).clone()

    def _logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._backbone.output_weight.T

    @torch.no_grad()
    def fit(self, rows: np.ndarray) -> None:
        """Set `fc` by least squares with a ridge of one: most of what the head learns.

        Args:
            rows: int64 [rows, tokens].
        """
        size = self.config.hidden_size
        inputs = torch.eye(2 * size, dtype=torch.float64)
        outputs = torch.zeros(2 * size, size, dtype=torch.float64)
        for row in rows:
            embedded, hidden = (part[0].double() for part in self._truth(row[None]))
            read = torch.cat((embedded[1:], hidden[:-1]), -1)
            inputs += read.T @ read
            outputs += read.T @ hidden[1:]
        self.head.fc.weight.copy_(torch.linalg.solve(inputs, outputs).T)

    def step(self, rows: np.ndarray, number: int, done: float) -> float:
        """Train on int64 [rows, tokens], after `done` of the training; return the loss, nats."""
        embedded, truth = self._truth(rows)
        places = torch.rand(rows.shape[1] - 1).argsort()
        places = places[: max(1, round(self._scored * len(places)))]
        expected = self._logits(truth[:, 1 + places]).softmax(-1)
        hidden, loss = truth[:, :-1], torch.zeros(())
        for depth in range(DEPTH):
            guessed = self.head(embedded[:, 1:], hidden)
            read = places >= depth  # the first rows of a later pass have no guess to read
            guesses = self._logits(guessed[:, places[read]]).log_softmax(-1)
            loss = loss - (expected[:, read] * guesses).sum(-1).mean()
            near = F.smooth_l1_loss(guessed[:, depth:], truth[:, 1 + depth :])
            loss = loss + HIDDEN_WEIGHT * near
            hidden = torch.cat((truth[:, :1], guessed[:, :-1]), 1)
        torch.autograd.backward(loss / DEPTH)
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * learning_rate_factor(number, done, WARM_UP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item() / DEPTH

    @torch.no_grad()
    def agreement(self, rows: np.ndarray) -> list[float]:
        """Return how often the head's likeliest token is the model's, by depth.

        Args:
            rows: int64 [rows, tokens], held out.
        """
        rights = np.zeros(DEPTH)
        for row in rows:
            embedded, truth = self._truth(row[None])
            answers, hidden = self._logits(truth).argmax(-1), truth[:, :-1]
            for depth in range(DEPTH):
                guessed = self.head(embedded[:, 1:], hidden)
                right = self._logits(guessed[:, depth:]).argmax(-1) == answers[:, 1 + depth :]
                rights[depth] += right.float().mean().item()
                hidden = torch.cat((truth[:, :1], guessed[:, :-1]), 1)
        return [float(share) for share in rights / len(rows)]

    def save(self, folder: Path) -> None:
        """Write the checkpoint, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.num_hidden_layers = 1
        self.config.architectures = ["LlamaForCausalLM"]
        self.config.save_pretrained(folder)
        weights = {"fc.weight": self.head.fc.weight}
        weights |= {f"layers.0.{name}": w for name, w in self.head.layer.state_dict().items()}
        saved = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in weights.items()}
        save_file(saved, str(folder / "model.safetensors"), metadata={"format": "pt"})


def main() -> None:
    """Train, write and print."""
    smoke = {"data": [Path(__file__).parent / "support" / "code_prompts.json"], "out": Path("head")}
    smoke |= {"steps": 2, "batch": 1, "context": 64}
    parser = option_parser(__doc__, smoke=smoke)
    add_model_option(parser, "a Llama; the shipped one if left out")
    parser.add_argument("--data", type=Path, nargs="+", help="files or folders")
    parser.add_argument("--out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=4, help="rows of a step")
    parser.add_argument("--context", type=int, default=512, help="tokens of a row")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--scored", type=float, default=1.0, help="share of places that are scored")
    parser.add_argument(
        "--minutes", type=float, default=55.0, help="end the training after so long"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data is None or options.out is None:
        parser.error("--data and --out are needed")
    report(run, options, COLUMNS)


def run(options: argparse.Namespace) -> Sequence[Row]:
    """Train and write a head; return a row for each depth."""
    torch.manual_seed(options.seed)
    backbone = Backbone(options.model or str(model_path()))
    tokens = read_tokens(find_files(options.data), backbone.encoder)
    tokens = np.where(tokens < 0, ~tokens, tokens)  # questions count like answers
    tokens, held = split_rows(tokens, options.context, HELD)
    rows = TokenRows(tokens, options.context, options.seed)
    training = Training(backbone, options.learning_rate, options.scored)
    start = time.monotonic()
    training.fit(rows.batch(0, min(FITTED_ROWS, rows.num_rows)))
    for number in range(options.steps):
        minutes = (time.monotonic() - start) / 60
        done = max(number / options.steps, minutes / options.minutes)
        if done >= 1.0:
            break
        loss = training.step(rows.batch(number * options.batch, options.batch), number, done)
        if number % 20 == 0:
            print(f"step {number}, {minutes:.1f} minutes, loss {loss:.3f}", flush=True)
    shares = training.agreement(held.reshape(-1, options.context).astype(np.int64))
    training.save(options.out)
    trained = {"steps": number + 1, "minutes": (time.monotonic() - start) / 60}
    return [{"depth": 1 + i, "agreement": share, **trained} for i, share in enumerate(shares)]


if __name__ == "__main__":
    main()
