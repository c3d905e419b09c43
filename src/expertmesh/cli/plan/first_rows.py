"""What the first rows of a data source are, through the tokenizer's template: what `expertmesh init` says of the data.

A few rows take a moment and show nearly every mistake; `expertmesh check` reads all of them.
"""

from transformers import PreTrainedTokenizerBase

from expertmesh.config import DataConfig, DataSource
from expertmesh.data import build_dataset

ROWS = 100


def first_rows(path: str, tokenizer: PreTrainedTokenizerBase, length: int, vocab_size: int) -> tuple[str, str]:
    """(format and targets, lengths) of the first rows of `path`, each as a few words.

    Raises `InputError` for what training would refuse about them, template included, and for preferences.
    """
    source = DataSource(path=path, max_rows=ROWS)
    config = DataConfig(train=(source,), max_length=length)
    dataset, report = build_dataset(config.train, config, tokenizer, model_vocab_size=vocab_size)
    how = report.methods.most_common(1)[0][0]
    longest = max(len(dataset.sample(number).input_ids) for number in range(len(dataset)))
    name, share = report.sources[0].format, report.target_tokens / report.tokens
    found = f"{name}; {share:.0%} of the tokens are targets, found by {how}"
    if report.cut:
        return found, f"cuts {report.cut} of the first {report.rows} rows, which are longer"
    return found, f"the longest of the first {report.rows} rows has {longest:,} tokens"
