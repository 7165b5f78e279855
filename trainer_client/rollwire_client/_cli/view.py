"""``rollwire view``: a page that shows prompts, samples and rewards, for a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rollwire_client._errors import RollwireError
from rollwire_client._view.page import render_page
from rollwire_client._view.page_data import page_data
from rollwire_client._view.source import open_source
from rollwire_client._view.tokenizer import read_tokenizer


def view(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            metavar="FILE",
            help="What Batcher.save or append_groups wrote.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            metavar="FILE",
            help="Page to write. Default: in the current folder, the input's name with .html.",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            metavar="PATH",
            help="Folder of a checkpoint, or a tokenizer.json. Default: token ids are shown.",
        ),
    ] = None,
) -> int:
    """Write a web page that shows samples: one file, to open in a browser and to pass on."""
    output = Path(f"{file.stem}.html") if output is None else output
    if output.exists() and output.samefile(file):
        raise typer.BadParameter("--output is the file to show: give it another name")
    texts = None if tokenizer is None else read_tokenizer(tokenizer)
    try:
        source = open_source(file)
        data = page_data(source.groups, texts)
    except OSError as error:
        raise RollwireError(f"{file} cannot be read: {error.strerror}") from error
    if not data.overview["groups"]:
        raise RollwireError(f"{file} has no groups: write some, then try again")
    page = render_page(source.name, source.summary, data)
    try:
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RollwireError(f"{output} cannot be written: {error.strerror}") from error
    sys.stderr.write(f"{output}: open it in a browser\n")
    return 0
