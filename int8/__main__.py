"""The library's own verbs: ``python -m int8 quantize MODEL --recipe R --out DIR [--package]`` and ``build``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from int8 import isa, recipe
from int8.errors import CalibrationError, Int8Error

if TYPE_CHECKING:
    from torch import nn

    from int8.calibrate import Batch

#: Texts of one calibration batch; lengths are mixed, padding is masked out.
_BATCH = 16

app = typer.Typer(add_completion=False, no_args_is_help=True, help="INT8 encoders in plain PyTorch.")


@app.command(epilog="Example: INT8_CACHE=/var/cache/int8 python -m int8 build")
def build() -> None:
    """Compile the kernels now, into INT8_CACHE or the user's cache, instead of when a model is first compiled."""
    from int8.kernels import build as kernels

    print(kernels.build(progress=lambda name: print(f"compiled {name}", file=sys.stderr, flush=True)))


@app.command(
    epilog="Example: INT8_ISA=vnni python -m int8 quantize ./my-bert --recipe sq-static --calibration texts.txt --out q"
)
def quantize(
    model: Annotated[str, typer.Argument(help="A folder that save_pretrained wrote, or a hub id.")],
    out: Annotated[Path, typer.Option(help="Folder to write: tensors, what they were built for, config, tokenizer.")],
    recipe_name: Annotated[str, typer.Option("--recipe", help="How numbers are represented.")] = "sq-dynamic",
    calibration: Annotated[Path | None, typer.Option(help="Text file, one real example a line; some hundreds.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest calibration text, in tokens.", min=2)] = 128,
    package: Annotated[
        bool, typer.Option("--package", help="Also write model-ISA.pt2: compiled, for any batch and length, one file.")
    ] = False,
) -> None:
    """Quantize a model and save it. The ISA is that of INT8_ISA, by default the best of this host."""
    chosen = recipe.get(recipe_name)
    if chosen.needs_calibration and calibration is None:
        raise CalibrationError(f"recipe {recipe_name!r} needs --calibration FILE: a text file, one real example a line")
    isa.apply()
    from transformers import AutoModel, AutoTokenizer

    import int8

    try:
        encoder = AutoModel.from_pretrained(model).eval()
        tokenizer = AutoTokenizer.from_pretrained(model) if calibration or (package and _has_tokenizer(model)) else None
    except (OSError, ValueError) as error:
        raise CalibrationError(f"cannot load {model!r}: {str(error).splitlines()[0]}") from error
    batches = list(_batches(tokenizer, calibration, max_length)) if calibration else None
    quantized = int8.quantize(encoder, chosen, batches, progress=_progress(len(batches or ())))
    int8.save(quantized, out)
    encoder.config.save_pretrained(out)
    if tokenizer is not None:
        tokenizer.save_pretrained(out)
    for name, module in int8.quantized_modules(quantized).items():
        print(f"{name}: {module.extra_repr()}", file=sys.stderr)
    if package:
        _package(quantized, out, tokenizer)
    print(out)


def _has_tokenizer(model: str) -> bool:
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return False
    return True


def _package(quantized: nn.Module, out: Path, tokenizer: Any) -> None:
    """Write the package beside the tensors. It takes what the tokenizer gives, ids and mask where there is none."""
    import torch

    import int8

    path = out / f"model-{isa.effective()}.pt2"
    print(f"packaging {path.name}, which compiles...", file=sys.stderr, flush=True)
    names = ("input_ids", "attention_mask") if tokenizer is None else tokenizer.model_input_names
    tokens = torch.zeros(2, 8, dtype=torch.long)
    inputs = {name: torch.ones_like(tokens) if name == "attention_mask" else tokens for name in names}
    info = int8.export(quantized, inputs, path, dynamic=True)
    print(f"{path.name}: {info.fused_linears} of {info.quantized_linears} linears fused", file=sys.stderr)


def _batches(tokenizer: Any, path: Path, max_length: int) -> Iterator[Batch]:
    """The file's lines as batches of the tokenizer's tensors.

    Raises:
        CalibrationError: the file cannot be read or has no text.
    """
    try:
        texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read {path}: {error}") from error
    if not texts:
        raise CalibrationError(f"{path} has no text; give some hundreds of real examples, one a line")
    for start in range(0, len(texts), _BATCH):
        encoded = tokenizer(
            texts[start : start + _BATCH], padding=True, truncation=True, max_length=max_length, return_tensors="pt"
        )
        yield dict(encoded)


def _progress(total: int) -> Any:
    def tell(done: int) -> None:
        print(f"\rcalibration batch {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    return tell


def main() -> None:
    """Run the verb; the library's errors become one line and exit code 1, wrong usage 64."""
    try:
        code = app(standalone_mode=False)
    except Int8Error as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "format_message"):  # click's own errors know how to say themselves
            raise
        print(f"error: {error.format_message()}; see python -m int8 --help", file=sys.stderr)
        sys.exit(64)
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
