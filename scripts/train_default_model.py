"""Trains the model that comes with the package, a small Llama, on five novels of Jane Austen.

The novels are in the public domain. Debian packs the text that Project Gutenberg made of them, and this script reads
that package as it is, so that nothing has to be installed from it:

    apt-get download r-cran-janeaustenr
    python scripts/train_default_model.py --deb r-cran-janeaustenr_1.0.0-1_all.deb

That takes about a minute and a half on an H200 and writes runtime/engine/data/default. It needs `piecework[hf]`.
For a look at whether it works, two minutes: `--device cpu --steps 20 --batch-size 2 --out DIR`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import io
import json
import math
import re
import struct
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch.nn import functional

OUT = Path(__file__).resolve().parent.parent / "runtime" / "engine" / "data" / "default"
TEXT_SHA256 = "db15f5179036ade8ce2cdb1cae4e8ec7347f7707be5a7a4b1e3589d3a15abbfd"
"""Of what `read_deb` makes of the package: another version with another text must not pass for this one."""
LEFT_OUT = "NORTHANGER ABBEY"
"""The package has it from an edition of the twentieth century, with that edition's spelling and note."""
BOS, EOS = "<|begin|>", "<|end|>"
HOLD_OUT = 20
"""One chapter in so many is kept from training, for the validation loss."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What decides the weights, beside the text; each field is a flag."""

    seed: int = 0
    steps: int = 1600
    batch_size: int = 32
    context: int = 512
    """Tokens in a training sample, and the model's max_position_embeddings."""
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 448
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 0.5
    dropout: float = 0.3
    eval_every: int = 100


# ---- the text: chapters, each a tuple of paragraphs


def read_deb(path: Path) -> str:
    """The novels' text: a paragraph a line, an empty line between chapters."""
    packed = _tar_member(_ar_member(path.read_bytes(), "data.tar"), "janeaustenr/data/Rdata.rdb")
    novels = [lines for lines in _r_string_vectors(packed) if lines[0] != LEFT_OUT]
    chapters = [chapter for lines in novels for chapter in _chapters(lines)]
    return "\n\n".join("\n".join(chapter) for chapter in chapters) + "\n"


def _ar_member(archive: bytes, prefix: str) -> bytes:
    """A member of an ar archive: 60 bytes of header each, the name first, the size in decimal at 48, padded to even."""
    offset = 8
    while offset < len(archive):
        name = archive[offset : offset + 16].decode().strip()
        size = int(archive[offset + 48 : offset + 58])
        offset += 60
        if name.startswith(prefix):
            return archive[offset : offset + size]
        offset += size + size % 2
    raise SystemExit(f"--deb: expected a Debian package with {prefix}.*, got a file without; download it again")


def _tar_member(archive: bytes, suffix: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(suffix) else None
            if file is not None:
                return file.read()
    raise SystemExit(f"--deb: expected a package with {suffix}, got another; download r-cran-janeaustenr")


def _r_string_vectors(packed: bytes) -> Iterator[list[str]]:
    """The objects of an R lazy-load database, all character vectors: a length, then zlib over R's XDR serialization.

    Format: "R Internals", section Serialization Formats. A string is flags, length, bytes; length -1 is a missing one.
    """
    while packed:
        inflate = zlib.decompressobj()
        data = inflate.decompress(packed[4:])
        packed = inflate.unused_data
        (encoding_length,) = struct.unpack_from(">i", data, 14)  # after "X\n" and three version numbers
        offset = 18 + encoding_length
        kind, count = struct.unpack_from(">ii", data, offset)
        if data[:2] != b"X\n" or kind & 0xFF != 16:
            raise SystemExit("--deb: expected R character vectors, got something else; use version 1.0.0-1")
        offset += 8
        lines = []
        for _ in range(count):
            _, length = struct.unpack_from(">ii", data, offset)
            offset += 8
            lines.append(data[offset : offset + max(length, 0)].decode("utf-8"))
            offset += max(length, 0)
        yield lines


_HEADING = re.compile(r"(volume|chapter) +[ivxlc\d]+\.?$", re.IGNORECASE)
_NO_PROSE = re.compile(r"(finis|the end|[*\s]+|\[.*(volume|edition).*)$", re.IGNORECASE)


def _chapters(lines: list[str]) -> Iterator[list[str]]:
    """Cuts a novel at its headings, which are dropped with all that stands before the first one."""
    chapter: list[str] | None = None
    for block in re.split(r"\n(?:[ \t]*\n)+", "\n".join(lines)):
        paragraph = " ".join(block.replace("_", "").split())
        if _HEADING.match(paragraph):
            if chapter:
                yield chapter
            chapter = []
        elif chapter is not None and paragraph and not _NO_PROSE.match(paragraph):
            chapter.append(paragraph)
    if chapter:
        yield chapter


# ---- the tokens


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """The text as the model gets it."""

    train: torch.Tensor
    """[num_tokens], int64: the chapters for training one after the other, an end token after each."""
    starts: torch.Tensor
    """[num_paragraphs], int64: where a paragraph starts in `train`, and `context` tokens follow."""
    validation: torch.Tensor
    """[num_windows, context + 1], int64: the other chapters in pieces, a begin token first, -1 after their end."""
    validation_bytes: int


def make_tokenizer(chapters: list[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer that puts the begin token in front of every text."""
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def split_chapters(text: str) -> tuple[list[str], list[str]]:
    """The chapters for training and those for validation."""
    chapters = [chapter.strip() for chapter in text.split("\n\n") if chapter.strip()]
    held_out = chapters[HOLD_OUT // 2 :: HOLD_OUT]
    if not held_out:
        raise SystemExit(f"text: expected more than {HOLD_OUT // 2} chapters, got {len(chapters)}; use a longer text")
    return [chapter for i, chapter in enumerate(chapters) if i % HOLD_OUT != HOLD_OUT // 2], held_out


def tokenize(tokenizer: Any, train: list[str], held_out: list[str], context: int) -> Tokens:
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    ids: list[int] = []
    starts: list[int] = []
    for chapter in train:
        for paragraph in chapter.splitlines():
            starts.append(len(ids))
            ids += tokenizer.encode(paragraph + "\n", add_special_tokens=False).ids
        ids.append(eos)
    starts = [start for start in starts if start + context <= len(ids)]
    if not starts:
        raise SystemExit(f"text: expected more than {context} tokens, got {len(ids)}; lower --context")
    windows = []
    for chapter in held_out:
        chapter_ids = [*tokenizer.encode(chapter + "\n", add_special_tokens=False).ids, eos]
        for i in range(0, len(chapter_ids), context):
            window = [bos, *chapter_ids[i : i + context]]
            windows.append(window + [-1] * (context + 1 - len(window)))
    return Tokens(
        train=torch.tensor(ids),
        starts=torch.tensor(starts),
        validation=torch.tensor(windows),
        validation_bytes=sum(len(chapter.encode()) + 1 for chapter in held_out),
    )


def batches(tokens: Tokens, settings: Settings, bos: int) -> Iterator[torch.Tensor]:
    """[batch_size, context + 1], int64, without end: a begin token and what follows the start of a paragraph.

    Every paragraph comes once an epoch, in an order that only the seed decides.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    offsets = torch.arange(settings.context)
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < settings.batch_size:
            order = torch.cat([order, torch.randperm(len(tokens.starts), generator=generator)])
        picked, order = order[: settings.batch_size], order[settings.batch_size :]
        samples = tokens.train[tokens.starts[picked, None] + offsets]
        yield torch.cat([torch.full((len(samples), 1), bos), samples], dim=1)


# ---- the model


def make_model(settings: Settings, tokenizer: Any) -> Any:
    torch.manual_seed(settings.seed)
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_kv_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(EOS),
    )
    model: Any = transformers.LlamaForCausalLM(config)

    def drop(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return functional.dropout(output, settings.dropout, module.training)

    # Llama has no dropout, but four megabytes are few: it goes on what enters the residual stream.
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(drop)
    return model


def loss_of(model: Any, samples: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats of `samples`, [num_samples, length], -1 where there is no token."""
    with torch.autocast("cuda", torch.bfloat16, enabled=samples.is_cuda):
        logits = model(input_ids=samples[:, :-1].clamp(min=0), use_cache=False).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), samples[:, 1:].flatten(), ignore_index=-1, reduction=reduction
    )


def validate(model: Any, validation: torch.Tensor, device: torch.device, batch_size: int) -> float:
    """The mean loss in nats a token."""
    model.eval()
    with torch.inference_mode():
        total = sum(loss_of(model, part.to(device), "sum").item() for part in validation.split(batch_size))
    model.train()
    return total / int((validation[:, 1:] >= 0).sum())


def train(model: Any, tokens: Tokens, settings: Settings, bos: int) -> dict[str, float]:
    """Trains in place and leaves the weights with the best validation loss; returns that, and its step."""
    device = model.device
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    warm_up = max(1, settings.steps // 20)
    best = {"validation_loss": math.inf, "step": 0}
    best_weights: dict[str, torch.Tensor] = {}
    started = time.perf_counter()
    model.train()
    for step, samples in zip(range(1, settings.steps + 1), batches(tokens, settings, bos), strict=False):
        progress = max(0.0, (step - warm_up) / max(1, settings.steps - warm_up))
        factor = min(step / warm_up, 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        loss = loss_of(model, samples.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % settings.eval_every == 0 or step == settings.steps:
            validation_loss = validate(model, tokens.validation, device, settings.batch_size)
            seconds = time.perf_counter() - started
            losses = f"train {loss.item():.3f}, validation {validation_loss:.3f}"
            print(f"step {step}: {losses}, {seconds:.0f} s", flush=True)
            if validation_loss < best["validation_loss"]:
                best = {"validation_loss": validation_loss, "step": step}
                best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    return best


def save(model: Any, tokenizer: Any, record: dict[str, Any], out: Path) -> None:
    """Writes the checkpoint: values in float16, which halves the file, and a config.json that asks for float32."""
    out.mkdir(parents=True, exist_ok=True)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    model.cpu().to(torch.float16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner alone, and a wheel would keep that
    tokenizer.save(str(out / "tokenizer.json"))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n")


def continue_text(model: Any, tokenizer: Any, prompt: str, temperature: float) -> str:
    model.eval()
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, pad_token_id=0, **sampling)
    return str(tokenizer.decode(written[0].tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--deb", type=Path, help="the Debian package r-cran-janeaustenr")
    source.add_argument("--text", type=Path, help="another text: a paragraph a line, an empty line between chapters")
    parser.add_argument("--out", type=Path, default=OUT, help="the checkpoint's directory (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help="(default: %(default)s)")
    arguments = parser.parse_args()
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})

    text = read_deb(arguments.deb) if arguments.deb is not None else arguments.text.read_text(encoding="utf-8")
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    if arguments.deb is not None and sha256 != TEXT_SHA256:
        raise SystemExit(f"--deb: expected a text with sha256 {TEXT_SHA256}, got {sha256}; use version 1.0.0-1")
    train_chapters, held_out = split_chapters(text)
    tokenizer = make_tokenizer(train_chapters, settings.vocab_size)
    tokens = tokenize(tokenizer, train_chapters, held_out, settings.context)
    model = make_model(settings, tokenizer).to(arguments.device)
    num_validation = int((tokens.validation[:, 1:] >= 0).sum())
    print(f"text: {len(text.encode())} bytes, sha256 {sha256}")
    print(f"tokens: {len(tokens.train)} to train on, {num_validation} held out; {len(tokens.starts)} samples an epoch")
    print(f"model: {sum(p.numel() for p in model.parameters())} parameters on {model.device}", flush=True)
    best = train(model, tokens, settings, tokenizer.token_to_id(BOS))
    bits = best["validation_loss"] * num_validation / tokens.validation_bytes / math.log(2)
    print(f"best: validation {best['validation_loss']:.3f} nats a token, {bits:.3f} bits a byte, step {best['step']}")
    torch.manual_seed(settings.seed)
    for prompt, temperature in (("The river", 0.0), ("Early in the morning", 0.0), ("She had", 0.7), ("It was a", 0.7)):
        print(f"[{temperature}] {continue_text(model, tokenizer, prompt, temperature)!r}")
    record = {
        "text_sha256": sha256,
        "settings": dataclasses.asdict(settings),
        **best,
        "validation_bits_per_byte": bits,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
    save(model, tokenizer, record, arguments.out)


if __name__ == "__main__":
    main()
