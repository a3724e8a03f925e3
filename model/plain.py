"""The default model on one page: attention, MLP, blocks, loss, sampling and training.

Begin here. gpt.py computes the same from the same weights: it adds caches and faster code, and
the other settings of attention, positions, norms and MLPs. No command runs this page. Tests compare the two, and
whoever takes a model elsewhere may copy it:

    model = PlainGPT(vocab_size, n_layer=4, n_head=4, n_embd=128)
    model.load_state_dict(safetensors.torch.load_file("outputs/…/checkpoints/step_450/model.safetensors"))

The sizes are those of "model" in the settings of meta.json, beside that file. Compare the other settings there with
the defaults in model/config.py: one that has no weights, such as a window, loads without a word, and the model is
another than the trained one.

B texts of T tokens; a token is a vector of C channels, which H heads divide into D = C / H each.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Causal multi-head attention (Vaswani et al. 2017, 3.2) with QK-norm and rotary positions."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.qkv_proj = nn.Linear(n_embd, 3 * n_embd, bias=False)  # queries, keys and values in one product
        self.o_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.q_norm = nn.RMSNorm(n_embd // n_head, eps=1e-6)
        self.k_norm = nn.RMSNorm(n_embd // n_head, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        H = self.n_head
        D = C // H

        # In each head a token has a query, which asks, a key, which answers, and a value, which others gather. QK-norm
        # keeps the scores from growing without bound.
        q, k, v = self.qkv_proj(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        q = rotate(self.q_norm(q))
        k = rotate(self.k_norm(k))

        # A query's score of each key, without those of later tokens, becomes weights that sum to 1.
        scores = q @ k.mT / math.sqrt(D)  # (B, H, T, T): a row for each query, a column for each key
        is_later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(is_later, -math.inf).softmax(-1)

        # Each head gathers values by its weights; o_proj mixes the heads.
        y = weights @ v  # (B, H, T, D)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of channels by an angle that grows with the position.

    The product of a turned query and a turned key depends on their distance alone (RoPE, Su et al. 2021, eq. 34).
    """
    T, D = x.shape[-2:]
    frequency = 10_000.0 ** (-torch.arange(0, D, 2, device=x.device) / D)  # (D/2,): from fast to slow
    angle = torch.arange(T, device=x.device)[:, None] * frequency  # (T, D/2)
    a, b = x[..., 0::2], x[..., 1::2]
    turned = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(turned, -1).flatten(-2)


class PlainMLP(nn.Module):
    """SwiGLU (Shazeer 2020, eq. 6): each token for itself, through a wider layer with a gate."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        width = 64 * math.ceil(8 * n_embd / 3 / 64)  # three matrices of 8/3 C weigh as much as the usual two of 4 C
        self.gate_up_proj = nn.Linear(n_embd, 2 * width, bias=False)
        self.down_proj = nn.Linear(width, n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class PlainBlock(nn.Module):
    """Attention, then MLP: each reads the normalised stream and adds a change to it."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(n_embd, eps=1e-6)
        self.attention = PlainAttention(n_embd, n_head)
        self.mlp_norm = nn.RMSNorm(n_embd, eps=1e-6)
        self.mlp = PlainMLP(n_embd)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainGPT(nn.Module):
    """Decoder-only transformer: logits of the next token, at each position."""

    def __init__(self, vocab_size: int, n_layer: int, n_head: int, n_embd: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.blocks = nn.ModuleList([PlainBlock(n_embd, n_head) for _ in range(n_layer)])
        self.final_norm = nn.RMSNorm(n_embd, eps=1e-6)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

        # Embeddings begin small. A layer keeps the size of its input, but those that write to the stream begin at 0,
        # and so does lm_head: each block is the identity at first, and all tokens are equally likely.
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                is_last = name.endswith(("o_proj", "down_proj", "lm_head"))
                nn.init.normal_(module.weight, std=0.0 if is_last else module.in_features**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)  # (B, T) -> (B, T, C)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.final_norm(x))  # (B, T, V)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean of -log p(target) in nats; targets are the tokens that follow.

        GPT.loss() returns the sum.
        """
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, count: int, block_size: int = 128, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        """Return tokens (B, T) and `count` more, drawn one by one from the probabilities.

        block_size: that of training; a longer context is cut to its end.
        temperature: above 0; 1 draws from the model's own probabilities, less makes likely tokens likelier.
        top_k: draw from so many likeliest tokens alone.
        """
        for _ in range(count):
            logits = self(tokens[:, -block_size:])[:, -1] / temperature  # (B, V), after the last token
            if top_k is not None:
                least = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < least, -torch.inf)
            p = logits.softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(p, 1)), 1)
        return tokens


def train(
    model: PlainGPT,
    text: Tensor,
    held_out: Tensor,
    steps: int,
    eval_interval: int = 100,
    lr: float = 1e-3,
    batch_size: int = 16,
    block_size: int = 128,
    file: str | None = None,
) -> list[float]:
    """Train a model on the tokens of a text, a row of ids; return its losses on a held-out text.

    held_out: more than block_size tokens.
    file: where the weights are kept after each evaluation, by torch.save().
    train.py reads each window once an epoch, has two optimizers, keeps the rate at its peak for a while, and goes on
    after a kill as if nothing had happened.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    losses = []
    for step in range(steps + 1):
        # Evaluate on a text that no step reads, and keep the weights.
        if step % eval_interval == 0 or step == steps:
            losses.append(evaluate(model, held_out, block_size))
            if file:
                torch.save(model.state_dict(), file)
        if step == steps:
            break

        # The learning rate: a line from lr down to 0 at the end, and less than that in the first nine steps.
        optimizer.param_groups[0]["lr"] = lr * min(1, (step + 1) / 10) * (1 - step / steps)

        # A batch: windows of the text at random places. The target of each token is the one that follows it.
        starts = torch.randint(len(text) - block_size, (batch_size, 1))
        windows = text[starts + torch.arange(block_size + 1)]  # (B, T + 1)

        # A step: forward, backward, clip, update.
        loss = model.loss(windows[:, :-1], windows[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@torch.no_grad()
def evaluate(model: PlainGPT, text: Tensor, block_size: int) -> float:
    """Return the mean loss on a text, in windows side by side."""
    count = (len(text) - 1) // block_size
    tokens = text[: count * block_size].view(count, block_size)
    targets = text[1 : count * block_size + 1].view(count, block_size)
    losses = [model.loss(tokens[i : i + 1], targets[i : i + 1]).item() for i in range(count)]
    return sum(losses) / count
