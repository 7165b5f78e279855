"""Makes verl's Parquet files of GSM8K's own files, which have a question and an answer a line.

    python examples/verl_gsm8k/prepare.py train.jsonl test.jsonl --to gsm8k

Any file of such lines will do, if each answer ends with ``#### NUMBER``.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import pandas

ASK = 'Let\'s think step by step and output the final answer after "####".'


def row(line: str, split: str, index: int) -> dict[str, Any]:
    """A prompt as verl reads it; "openai/gsm8k" chooses verl's rule for the reward."""
    given = json.loads(line)
    _, found, answer = given["answer"].rpartition("####")
    if not found:
        raise ValueError(f"line {index + 1} of {split}: the answer has no '#### NUMBER'")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{given['question']} {ASK}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index},
    }


def prepare(source: Path, folder: Path) -> Path:
    """Writes the file of the same name."""
    lines = source.read_text().splitlines()
    rows = [row(line, source.stem, index) for index, line in enumerate(lines) if line]
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{source.stem}.parquet"
    pandas.DataFrame(rows).to_parquet(made)
    return made


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path("gsm8k"))
    options = parser.parse_args()
    for file in options.files:
        print(prepare(file, options.to))
