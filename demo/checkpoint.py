"""The checkpoint's directory: what is in it, when it is complete, and how it is written."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import Gemma3ForCausalLM, PreTrainedTokenizerFast

from demo.training import Recipe
from disagg.errors import ConfigError

MARKER = "demo_checkpoint.json"
UNFINISHED_MARKER = MARKER + ".unfinished"
_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True, slots=True)
class Marker:
    """Written last, so its presence proves that everything else is there.

    Attributes:
        recipe: digest of the code and numbers that made the weights.
        seed: the seed of the training run.
        trained_seed: the seed that met the target; differs when the first one missed it.
        accuracy: share of whole answers that are right on held-out prompts.
    """

    recipe: str
    seed: int
    trained_seed: int
    accuracy: float


def recipe_digest(recipe: Recipe) -> str:
    """Digest of the recipe and of the modules whose change would change the checkpoint."""
    digest = hashlib.sha256(repr(recipe).encode())
    for name in ("model.py", "task.py", "tokenizer.py", "training.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def read_marker(directory: Path) -> Marker | None:
    """The marker of a complete checkpoint; None if there is none or it cannot be read."""
    try:
        return Marker(**json.loads((directory / MARKER).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def prepare_directory(directory: Path) -> None:
    """Create the directory, or empty it of an unfinished or outdated demo checkpoint.

    Raises:
        ConfigError: it cannot be written, or is not ours: other checkpoints' files have the same
            names, so only a directory that bears one of our markers, and nothing else, is emptied.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = {path.name for path in directory.iterdir()}
        foreign = sorted(present - {MARKER, UNFINISHED_MARKER, *_FILES})
        if present and not present & {MARKER, UNFINISHED_MARKER}:
            foreign = sorted(present)
        if foreign:
            raise ConfigError(
                f"out: {directory} holds {foreign[0]!r}, which no demo checkpoint put there; "
                "choose an empty or new directory",
                param="out",
            )
        (directory / UNFINISHED_MARKER).touch()
        # The marker goes first: what is half deleted must not look complete.
        for name in (MARKER, *_FILES):
            (directory / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"out: {directory} cannot be used: {error}", param="out") from error


def write_checkpoint(
    directory: Path,
    model: Gemma3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    marker: Marker,
) -> None:
    """Write model and tokenizer into a prepared directory, and last the marker."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    unfinished = directory / UNFINISHED_MARKER
    unfinished.write_text(json.dumps(asdict(marker), indent=2) + "\n")
    unfinished.replace(directory / MARKER)
