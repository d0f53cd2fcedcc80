"""Named data sets and the local files behind them."""

import gzip
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from torchtitan_dmuon.data import (
    CorpusTokenizer,
    dataset_kind,
    dataset_names,
    open_source,
    readers,
    register_datasets,
)

WriteJsonl = Callable[..., Path]


def documents(path: Path | str, text_key: str = "text") -> list[str]:
    return list(open_source("local_files", str(path), text_key).documents())


@pytest.fixture
def registry() -> Iterator[dict[str, object]]:
    """torchtitan's registry, put back as it was afterwards."""
    before = dict(DATASETS)
    yield DATASETS
    DATASETS.clear()
    DATASETS.update(before)


def test_import_has_no_side_effects() -> None:
    """Importing the package leaves torchtitan's registry alone."""
    code = (
        "from torchtitan.hf_datasets.text_datasets import DATASETS; before = dict(DATASETS); "
        "import torchtitan_dmuon.data; assert DATASETS == before, sorted(DATASETS)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_register_is_idempotent_and_refuses_a_taken_name(registry: dict[str, object]) -> None:
    """Registering twice changes nothing; another package's set of that name is not replaced."""
    registry.pop("fineweb_edu", None)
    register_datasets()
    first = dict(registry)
    register_datasets()
    assert dict(registry) == first
    assert {"python_stdlib", "local_files", "fineweb_edu", "c4"} <= set(registry)
    registry["fineweb_edu"] = registry["c4"]
    with pytest.raises(ValueError, match="already has another data set called 'fineweb_edu'"):
        register_datasets()


def test_torchtitan_loader_reads_registered_set(
    registry: dict[str, object], prose_file: Path, tokenizer: CorpusTokenizer
) -> None:
    """torchtitan's own text loader accepts our names and yields batches of the right shape."""
    register_datasets()
    config = HuggingFaceTextDataLoader.Config(
        dataset="local_files", dataset_path=str(prose_file), infinite=False
    )
    loader = config.build(
        dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=16, local_batch_size=2
    )
    inputs, labels = next(iter(loader))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 16)


def test_kinds_and_unknown_name() -> None:
    """Each name has one kind; an unknown one is answered with the nearest and the whole list."""
    kinds = [dataset_kind(name) for name in ("python_stdlib", "fineweb_edu", "random_tokens", "c4")]
    assert kinds == ["corpus", "streamed", "random", "streamed"]
    with pytest.raises(ValueError, match="did you mean 'fineweb_edu'") as error:
        dataset_kind("fineweb-edu")
    assert all(name in str(error.value) for name in dataset_names())
    with pytest.raises(ValueError, match="'fineweb_edu' is streamed, not a set of local files"):
        open_source("fineweb_edu")


def test_stdlib_rules(tmp_path: Path) -> None:
    """The library's sources in path order, without tests, installed packages, machine-dependent
    files and files in another encoding; a folder that is no library is refused."""
    for name in ("os.py", "b/z.py", "a.py", "test/x.py", "site-packages/y.py", "config-3/c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "_sysconfigdata__linux.py").write_text("no")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "data.txt").write_text("no")
    source = open_source("python_stdlib", str(tmp_path))
    assert list(source.documents()) == ["a.py", "b/z.py", "os.py"]
    with pytest.raises(ValueError, match=r"has no os\.py.*dataset = 'local_files'"):
        open_source("python_stdlib", str(tmp_path / "b"))


def test_every_file_kind_gives_the_same_documents(
    tmp_path: Path, prose: list[str], write_jsonl: WriteJsonl
) -> None:
    """JSON lines, plain or compressed, Parquet and text files hold the same documents."""
    plain = write_jsonl(tmp_path / "a.jsonl", prose)
    assert documents(plain) == prose
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert documents(tmp_path / "b.json.gz") == prose
    with pa.CompressedOutputStream(str(tmp_path / "c.jsonl.zst"), "zstd") as stream:
        stream.write(plain.read_bytes())
    assert documents(tmp_path / "c.jsonl.zst") == prose
    pq.write_table(pa.table({"body": prose}), tmp_path / "d.parquet", row_group_size=2)
    assert documents(tmp_path / "d.parquet", "body") == prose
    for number, text in enumerate(prose):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    assert documents(tmp_path / "?.txt") == prose


def test_folder_order_and_what_it_passes_over(tmp_path: Path) -> None:
    """A folder is read recursively in path order; hidden and foreign files are passed over."""
    for name in ("b/1.md", "a.py", "c.txt", ".hidden.txt", ".git/x.txt", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents(tmp_path) == ["a.py", "b/1.md", "c.txt"]
    assert documents(tmp_path / "**" / "*.md") == ["b/1.md"]


def test_path_errors_say_what_is_there(tmp_path: Path, write_jsonl: WriteJsonl) -> None:
    """Missing, unreadable and empty paths name the path, what was expected and what is near."""
    write_jsonl(tmp_path / "corpus.jsonl", ["a"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.jsonk").write_text("")
    cases = {
        tmp_path / "corpus.jsnl": r"corpus\.jsnl does not exist.*did you mean 'corpus\.jsonl'",
        tmp_path / "empti" / "x.txt": r"empti is missing\); did you mean 'empty'",
        tmp_path / "empty": "no readable file below the folder",
        tmp_path / "*.csv": "no file matches the pattern",
        tmp_path / "notes.jsonk": r"unsupported suffix '\.jsonk'; did you mean '\.json.?'",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            documents(path)
    with pytest.raises(ValueError, match="'local_files' needs the path"):
        open_source("local_files")


def test_damaged_jsonl_names_the_line(tmp_path: Path) -> None:
    """A broken line, a missing key, a wrong type or half a character is reported with its line."""
    path = tmp_path / "x.jsonl"
    cases = {
        '{"text": "a"}\n\n{"text": ': "line 3: expected one JSON object per line",
        '["a"]\n': "line 1: expected a JSON object, found list",
        '{"text": "a"}\n{"txt": "b", "id": 1}\n': r"line 2: no 'text', found the keys \['id', "
        r"'txt'\]; did you mean 'txt'\?",
        '{"text": null}\n': "line 1: 'text' holds NoneType, expected text",
        '{"text": "\\ud83d"}\n': "line 1: 'text' holds the lone surrogate",
    }
    for content, message in cases.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            documents(path)
        assert str(path) in str(error.value)


def test_damaged_binary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut or foreign compressed and Parquet files, wrong encodings and huge texts are refused."""
    packed = gzip.compress(b'{"text": "a"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(packed[:-12])
    (tmp_path / "bad.jsonl.zst").write_bytes(b"not compressed")
    (tmp_path / "bad.parquet").write_bytes(b"not a Parquet file at all")
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "key.parquet")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "huge.txt").write_bytes(b"a" * 101)
    monkeypatch.setattr(readers, "MAX_TEXT_FILE_BYTES", 100)
    cases = {
        "cut.jsonl.gz": "damaged file after line",
        "bad.jsonl.zst": "damaged file after line 0",
        "bad.parquet": "damaged Parquet file",
        "key.parquet": r"no 'text', found the keys \['body', 'n'\]",
        "latin.txt": "expected UTF-8 text, byte 3 is 0xe9",
        "huge.txt": "one document and may have up to 100 bytes",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            documents(tmp_path / name)
        assert name in str(error.value)
