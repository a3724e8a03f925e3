"""The settings of sample.py and eval.py."""

import math
from dataclasses import dataclass, field

from common.errors import ANY_SEED, SettingsError, at_least, check_types, format_value, fraction, in_utf8, one_of
from data.config import VOCABULARIES, WITH_PATH

SEEDS = 2**32
"""Seeds with a text of their own: torch takes more, and draws the numbers of the lowest 32 bits of each."""
NO_LINES = (".csv", ".tsv", ".xlsx", ".parquet", ".html", ".xml", ".yaml", ".md")  # names of other formats


@dataclass(kw_only=True)
class SamplingParams:
    """Sampling parameters; the defaults sample from the model's own distribution."""

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Sample from the k likeliest tokens only."""
    top_p: float = 1.0
    """Nucleus sampling (Holtzman et al. 2020): sample from the fewest likeliest tokens whose
    probabilities sum to p."""
    min_p: float = 0.0
    """Sample from tokens at least this fraction as likely as the likeliest (Nguyen et al. 2024)."""
    max_new_tokens: int = 256
    """Length limit of a sample in tokens; it also ends where the model ends the document."""
    stop: list[str] | None = field(default_factory=list)
    """End a sample before the first of these strings, as in 'stop=\\n\\n' or 'stop=["\\n\\n","THE END"]'."""

    def __post_init__(self) -> None:
        if self.stop is None:  # as others write it
            self.stop = []
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        check_types(self)
        # A smaller divisor could make logits of float32 infinite.
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            fault = "must be 0, or finite and at least 1e-06"
            raise SettingsError(fault, setting="temperature", value=self.temperature)
        if self.top_k is not None and self.top_k < 1:  # as others write it
            remedy = "leave it out to sample from all tokens"
            raise SettingsError("must be at least 1", remedy, setting="top_k", value=self.top_k)
        fraction("top_p", self.top_p, above=0)
        fraction("min_p", self.min_p)
        until = "a sample ends with its document, so max_new_tokens=100000 lets the model choose"
        at_least("max_new_tokens", self.max_new_tokens, 1, until)
        if "" in self.stop:
            raise SettingsError("stop has an empty string, which every text contains", "remove it")
        for text in self.stop:
            in_utf8("stop", text)


@dataclass(kw_only=True)
class SampleConfig(SamplingParams):
    """Settings of sample.py."""

    checkpoint: str | None = None
    """Directory of a run, for its best checkpoint, or of a checkpoint; the newest run if null."""
    code: str | None = None
    """Your own Python file, run first: it registers forms and modifiers of the checkpoint."""
    prompt: str = ""
    """Text to continue; the start of a document if empty."""
    prompt_file: str | None = None
    """File with the prompt; - is standard input."""
    prompts: str | None = None
    """File of many prompts: one a line, or JSON lines, a JSON array or CSV with the field prompt and
    perhaps seed; - is standard input. The samples are JSON lines."""
    results: str | None = None
    """File for the samples as JSON lines, continued if a run of the same command was killed; -, as if
    prompts alone is given, is standard output."""
    interactive: bool = False
    """Ask for prompts until Ctrl-D; /help lists the commands."""

    num_samples: int = 1
    """Number of samples of each prompt."""
    batch_size: int = 16
    """Samples to generate in one batch."""
    temperature: float = 0.8
    seed: int = 1
    """Seed of the first sample; each next one has the next seed."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the weights: fp32, bf16 or fp16; auto is bf16 on GPUs that have it, else fp32."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # One input and one output.
        for alternatives in (("prompt", "prompt_file", "prompts", "interactive"), ("results", "interactive")):
            given = [name for name in alternatives if getattr(self, name)]
            if len(given) > 1:
                settings = " and ".join(f"{name}={format_value(getattr(self, name))}" for name in given)
                raise SettingsError(f"{settings} are given", "choose one")
        if str(self.results).lower().endswith(NO_LINES):
            remedy = "give its name the ending .jsonl; docs/generation.md has the line that makes a table"
            raise SettingsError(f"results={self.results} gets JSON lines", remedy)
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        at_least("num_samples", self.num_samples, 1)
        at_least("batch_size", self.batch_size, 1)
        # A sample's seed is seed + its number.
        at_least("seed", self.seed, 0, ANY_SEED)
        if self.seed > SEEDS - self.num_samples:
            problem = f"seed={self.seed} must be from 0 to 2^32 less num_samples={self.num_samples}"
            raise SettingsError(problem, ANY_SEED if self.seed >= SEEDS else "lower num_samples")


AS_TRAINED = "as in training"
# The sources of a text to score.
SCORED = ("files", "text", "jsonl", "csv", "hf", "stdlib", "tales", "shakespeare")


@dataclass(kw_only=True)
class TextConfig:
    """Settings of the text to score, read as in the training of the checkpoint."""

    source: str | None = None
    """Source of the text, as of train.py: files, text, jsonl, csv, hf (Parquet), stdlib, tales or
    shakespeare; if null, files for data.path, and otherwise the validation split of the checkpoint's run."""
    path: str | None = None
    """File, folder (searched at any depth) or glob, read in its format: text, JSON lines, a JSON array, CSV
    or Parquet."""
    text_field: str | None = None
    """The field or column that holds a document's text; that of the checkpoint's run if null."""
    separator: str | None = AS_TRAINED
    """The text that separates documents, by default that of the checkpoint's run; when null each file
    or record is one document."""

    def __post_init__(self) -> None:
        check_types(self, "data.")
        if self.source in VOCABULARIES:
            problem = f"data={self.source} is a task, on which eval.py scores the models that have learned it"
            raise SettingsError(problem, "leave it out")
        if self.source is not None:
            one_of("data.source", self.source, SCORED)
        if self.source in (*WITH_PATH, "hf") and not self.path:
            raise SettingsError(f"data={self.source} has nothing to score", "give data.path=..., a file or folder")

    @property
    def reading(self) -> dict[str, str | None]:
        """The settings that say how a text is read, if they are given."""
        given = {"data.text_field": self.text_field} if self.text_field is not None else {}
        return given | ({"data.separator": self.separator} if self.separator != AS_TRAINED else {})

    @property
    def is_given(self) -> bool:
        """Whether a text is named, in place of the validation split."""
        return self.source is not None or self.path is not None


@dataclass(kw_only=True)
class EvalConfig:
    """Settings of eval.py."""

    checkpoint: str | None = None
    """Directory of a run, for its best checkpoint, or of a checkpoint; the newest run if null."""
    against: str | None = None
    """Second checkpoint, to compare on the same text."""
    code: str | None = None
    """Your own Python file, run first: it registers forms and modifiers of the checkpoint."""
    data: TextConfig = field(default_factory=TextConfig)
    stride: int | None = None
    """Distance between the scored sequences; an eighth of block_size if null. Every token after
    the first block_size has at least block_size - stride tokens before it. 1 is exact and slow; block_size
    is the largest and fastest, and the one that the trainer reports."""
    tales: bool = False
    """Instead of scoring, let a model of data=tales write 64 tales; print the right share.
    A tale is right if it keeps names, pronouns, things and who has them to its end."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""
    precision: str = "auto"
    """Type of the matrix products: fp32, bf16 or fp16; auto takes the run's setting.
    If that is auto too, bf16 where it is fast."""

    def __post_init__(self) -> None:
        check_types(self)
        one_of("precision", self.precision, ("auto", "fp32", "bf16", "fp16"))
        at_least("stride", self.stride, 1)
        # Tales take the place of scoring, to which these settings belong.
        of_scoring = {"against": self.against, "stride": self.stride, "data.path": self.data.path}
        of_scoring |= {"data": self.data.source, "precision": self.precision if self.precision != "auto" else None}
        reading = self.data.reading
        for name, value in (of_scoring | reading).items():
            if self.tales and (value or name in reading):
                raise SettingsError(f"{name}={format_value(value)} and tales=true are both given", "choose one")
        for name, value in reading.items():
            if not self.data.is_given:
                remedy = "leave it out for the validation split, which is read as in training, or give data.path=..."
                raise SettingsError("is given without a text", remedy, setting=name, value=value)
