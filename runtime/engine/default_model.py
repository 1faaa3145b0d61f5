"""The model that comes with the package: where its files are. `scripts/train_default_model.py` makes them."""

from __future__ import annotations

from pathlib import Path

from ...errors import ModelError

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
"""What a checkpoint needs; NOTICE.md beside them says where the text came from and how the model was trained."""

_DIRECTORY = Path(__file__).resolve().parent / "data" / "default"


def path() -> Path:
    """The directory of the default model, a small Llama in the form of a Hugging Face checkpoint. Not to be written to.

    Raises:
        ModelError: a file is missing from the installation.
    """
    missing = [name for name in FILES if not (_DIRECTORY / name).is_file()]
    if missing:
        raise ModelError(
            f"default model: expected {', '.join(FILES)} in {_DIRECTORY}, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing; reinstall piecework, or name another model"
        )
    return _DIRECTORY
