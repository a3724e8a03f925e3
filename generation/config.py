"""The settings of sample.py and eval.py; generation/generate.py applies SamplingParams."""

import math
from dataclasses import dataclass, field

from common.errors import SettingsError, at_least, format_value, fraction, one_of, positive


@dataclass(kw_only=True)
class SamplingParams:
    """How a text is drawn; the defaults draw from the model's own distribution."""

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter, 0 always the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens whose probabilities reach this sum (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Draw from tokens at least this fraction as likely as the likeliest (Nguyen et al. 2024)."""
    repetition_penalty: float = 1.0
    """Makes tokens that the text already has less likely, where above 1 (Keskar et al. 2019)."""
    max_new_tokens: int = 256
    """Longest sample, in tokens; it also ends where the model ends the document."""
    stop: list[str] = field(default_factory=list)
    """End a sample before the first of these strings, as in stop=["\\n\\n"]."""

    def __post_init__(self) -> None:
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:  # float32 holds no larger quotient
            raise SettingsError(f"temperature={format_value(self.temperature)} must be 0, or finite and at least 1e-06")
        at_least("top_k", self.top_k, 1)
        fraction("top_p", self.top_p, above=0)
        fraction("min_p", self.min_p)
        positive("repetition_penalty", self.repetition_penalty)
        at_least("max_new_tokens", self.max_new_tokens, 1)
        if "" in self.stop:
            raise SettingsError("stop has an empty string, which every text contains", "remove it")


@dataclass(kw_only=True)
class SampleConfig(SamplingParams):
    """What to generate, and how."""

    checkpoint: str | None = None
    """A run's directory, for its best checkpoint, or a checkpoint's; the newest run when null."""
    prompt: str = ""
    """What the text continues; the start of a document when empty."""
    prompt_file: str | None = None
    """File to read the prompt from; - is standard input."""
    prompts: str | None = None
    """File to read many prompts from, {"prompt": "…"} a line; - is standard input."""
    results: str | None = None
    """New file for the samples as JSON, one a line; - is standard output."""
    interactive: bool = False
    """Ask for prompts until Ctrl-D; /help shows what else can be typed."""
    special_tokens: bool = False
    """Read <|endoftext|> and the like in a prompt as special tokens instead of text."""

    num_samples: int = 1
    """Samples for each prompt."""
    batch_size: int = 16
    """Samples to generate at a time."""
    temperature: float = 0.8
    seed: int = 1
    """Sample i of a prompt is drawn with seed + i."""
    logprobs: bool = False
    """Add each token's log-probability, in nats and before the controls, to results."""
    page: str | None = None
    """Instead of generating, write a page of how the model reads the prompt to this .html file: its surprise, what it
    expected, what every head looked at."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the weights: fp32, bf16 or fp16; auto is bf16 on GPUs that have it, else fp32."""
    compile: str = "off"
    """torch.compile the step that writes a token: on or off. Compiling takes a minute or more before the second token.
    On a GPU, where launching some 28 kernels a layer is most of a step's time, a few should be left; no GPU was
    at hand to measure it. On a CPU it seldom pays. torch cannot trace
    attention=index whole, and decodes it partly as written."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inputs = ("prompt", "prompt_file", "prompts", "interactive")
        outputs = ("page", "results", "interactive")
        for alternatives in (inputs, outputs, ("page", "prompts")):
            given = [f"{name}={format_value(value)}" for name in alternatives if (value := getattr(self, name))]
            if len(given) > 1:
                raise SettingsError(f"{' and '.join(given)} are given", "choose one")
        if self.logprobs and not (self.results or self.prompts):
            raise SettingsError("logprobs=true is written as JSON", "add results=FILE, or results=- to see it here")
        check_page(self.page)
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        one_of("compile", self.compile, ("on", "off"))
        at_least("num_samples", self.num_samples, 1)
        at_least("batch_size", self.batch_size, 1)
        if not 0 <= self.seed < 2**63 - self.num_samples:
            problem = f"seed={self.seed} must be from 0 to 2^63 less num_samples={self.num_samples}"
            raise SettingsError(problem, "change one of them")


@dataclass(kw_only=True)
class TextConfig:
    """The text to score."""

    path: str | None = None
    """A file, a folder (searched at any depth) or a glob; the validation split of the checkpoint's run when null."""


@dataclass(kw_only=True)
class EvalConfig:
    """What to score, and how."""

    checkpoint: str | None = None
    """A run's directory, for its best checkpoint, or a checkpoint's; the newest run when null."""
    against: str | None = None
    """A second one, to compare on the same text."""
    data: TextConfig = field(default_factory=TextConfig)
    stride: int | None = None
    """Each token has at least block_size - stride tokens before it; an eighth of block_size when null. 1 is exact and
    slow; block_size, the most, is fast and what the trainer reports."""
    page: str | None = None
    """File for a page of the text: each token's surprise, what was expected, what every head looked at."""
    probes: bool = False
    """Instead of scoring, probe what the model does: induction, loss by position up to 16 × block_size, sinks, gates, a
    needle. Figures go to step_N.probes.json beside the checkpoint."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the matrix products: fp32, bf16 or fp16; auto is the run's, whose own auto is bf16 where that is fast."""

    def __post_init__(self) -> None:
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        at_least("stride", self.stride, 1)
        check_page(self.page)
        if self.probes and (given := [name for name in ("against", "stride", "page") if getattr(self, name)]):
            raise SettingsError(f"{given[0]}={getattr(self, given[0])} and probes=true are both given", "choose one")


def check_page(page: str | None) -> None:
    if page and not page.endswith(".html"):
        raise SettingsError(f"page={page} is a page", "give its name the ending .html")
