"""`agentspec corpus`: builds, lists and checks corpora, and says in one line what it cannot use."""

import json
import os
from pathlib import Path

import pytest

from agentspec import cli
from agentspec.cache.corpus import load
from agentspec.engine.chat import Chat
from agentspec.engine.corpora import place_of

RUN = {
    "id": "run", "source": "demo", "domain": "swe",
    "messages": [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: Path) -> None:
    for name in [name for name in os.environ if name.startswith("AGENTSPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AGENTSPEC_MODEL_NAME", str(tiny_model))
    monkeypatch.setenv("AGENTSPEC_MODEL_HOME", str(tmp_path / "home"))


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    runs, text = tmp_path / "runs.jsonl", tmp_path / "notes.md"
    runs.write_text(json.dumps(RUN) + "\n" + json.dumps(RUN | {"id": "other"}) + "\n")
    text.write_text("some notes, ünicode too")
    return [str(runs), str(text)]


def test_runs_and_texts_are_indexed(
    tmp_path: Path, tiny_model: Path, sources: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["corpus", "build", "mine", *sources]) == 0
    said = capsys.readouterr().out
    file = place_of("mine", tmp_path / "home")
    assert said.startswith("mine: 3 documents, ")
    assert said.endswith(f", {file}\n")
    index, chat = load(file).index, Chat.load(tiny_model)
    assert index.count(chat.tokenize("some notes, ünicode too", special=False)) == 1
    assert index.count(chat.tokenize("answer", special=False)) >= 1
    assert cli.main(["corpus", "list"]) == 0
    assert capsys.readouterr().out == said
    assert cli.main(["corpus", "verify", "mine", str(file)]) == 0
    assert capsys.readouterr().out == f"mine: nothing is damaged\n{file}: nothing is damaged\n"


def test_json_has_the_same(tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "elsewhere" / "x.corpus"
    assert cli.main(["corpus", "build", str(target), *sources, "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert built == built | {"corpus": str(target), "file": str(target), "documents": 3, "bytes": target.stat().st_size}
    assert cli.main(["corpus", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"corpora": [], "problems": []}
    assert cli.main(["corpus", "verify", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checked": 1, "problems": {}}


def test_none_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["corpus", "list"]) == 0
    assert capsys.readouterr().out.startswith("there are no corpora in ")


def test_building_again_replaces(tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["corpus", "build", "mine", *sources]) == 0
    assert cli.main(["corpus", "build", "mine", sources[1]]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("mine: 1 documents, ")
    assert [file.name for file in (tmp_path / "home" / "corpora").iterdir()] == ["mine.corpus"]


def test_damage_is_an_exit_code(tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["corpus", "build", "mine", *sources]) == 0
    file = place_of("mine", tmp_path / "home")
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"abcd")
    (file.parent / "other.corpus").write_text("something else")
    capsys.readouterr()
    assert cli.main(["corpus", "verify", "mine", "other", "none"]) == 1
    damaged, other, missing = capsys.readouterr().out.splitlines()
    assert damaged == f"{file} is damaged"
    assert "other.corpus is no whole corpus file" in other
    assert missing.endswith("none.corpus: No such file or directory")
    assert cli.main(["corpus", "list"]) == 1
    assert "other.corpus is no whole corpus file" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.txt", None, "x.txt is no file"),
        ("x.txt", b"abc\xff", "x.txt is no text in UTF-8: invalid start byte at byte 3"),
        ("x.txt", b"", "there is nothing in these files to draft from"),
        ("x.jsonl", b"{}\n", "x.jsonl:1: "),
        ("x.jsonl", b"", "there is nothing in these files to draft from"),
        ("x.jsonl.gz", b"no gzip", "cannot be read"),
    ],
)
def test_bad_files_leave_the_corpus_that_is_there(
    tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, said: str
) -> None:
    assert cli.main(["corpus", "build", "mine", *sources]) == 0
    before = place_of("mine", tmp_path / "home").read_bytes()
    capsys.readouterr()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert cli.main(["corpus", "build", "mine", str(tmp_path / name)]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("agentspec: ")
    assert complaint.count("\n") == 1
    assert said in complaint
    assert place_of("mine", tmp_path / "home").read_bytes() == before


@pytest.mark.parametrize("name", ["../mine", "a/b", "", ".hidden", "a b", "x" * 200])
def test_a_name_is_no_path(sources: list[str], capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.main(["corpus", "build", name, *sources]) == 2
    assert "is no name of a corpus" in capsys.readouterr().err


def test_a_folder_is_not_replaced(tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "folder.corpus"
    target.mkdir()
    assert cli.main(["corpus", "build", str(target), *sources]) == 1
    assert "is no plain file" in capsys.readouterr().err


def test_a_folder_that_takes_no_file_is_named(
    tmp_path: Path, sources: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["corpus", "build", str(tmp_path / "file" / "x.corpus"), *sources]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
