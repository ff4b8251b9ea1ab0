"""Sources: files, documents, and one clear sentence for each kind of bad input."""

import json
import os
import re
import shlex
import sysconfig
from pathlib import Path

import pytest

from meshwright.data.readers import read_documents
from meshwright.data.sources import find_files
from meshwright.spec.data import DataSpec, SourceSpec
from meshwright.spec.recipe import parse_spec


def documents(base_dir, *sources):
    files = find_files(DataSpec(sources=sources), base_dir)
    return [(document.id, document.text) for document in read_documents(files)]


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def test_spellings_of_sources():
    default = DataSpec()
    assert default.sources == (SourceSpec(path="stdlib"),)
    assert DataSpec.model_validate({"sources": "stdlib"}) == default
    assert DataSpec.model_validate({"sources": {"path": "stdlib"}}) == default
    both = DataSpec.model_validate({"sources": ["stdlib", {"path": "a.jsonl", "text_key": "body"}]})
    assert [(source.path, source.text_key) for source in both.sources] == [
        ("stdlib", "text"),
        ("a.jsonl", "body"),
    ]
    assert DataSpec.model_validate(both.model_dump()) == both
    with pytest.raises(ValueError, match="sources"):
        DataSpec.model_validate({"sources": []})


def test_order_is_sources_then_names(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "more.jsonl"):
        write(tmp_path / name, '{"text": "J"}\n' if name.endswith("jsonl") else name)
    assert documents(tmp_path, "more.jsonl", "**/*.txt") == [
        ("more.jsonl:1", "J"),
        ("a.txt", "a.txt"),
        ("b.txt", "b.txt"),
        ("deep/er/c.txt", "deep/er/c.txt"),
    ]


def test_text_is_kept_as_it_is(tmp_path):
    write(tmp_path / "a.txt", "\ufeffline\r\nnext\r\n\u2028 end ")
    assert documents(tmp_path, "a.txt") == [("a.txt", "line\r\nnext\r\n\u2028 end ")], "only the mark goes"


def test_json_lines(tmp_path):
    lines = [{"body": "one\ntwo", "n": 1}, {"body": ""}, {"body": "drei €"}]
    write(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = documents(tmp_path, {"path": "a.jsonl", "text_key": "body"})
    assert found == [("a.jsonl:1", "one\ntwo"), ("a.jsonl:3", "drei €")]


def test_names_are_literal_where_they_exist(tmp_path):
    folder = tmp_path / "set[1]"
    write(folder / "a[0].txt", "x")
    assert documents(folder, "a[0].txt") == [("a[0].txt", "x")]
    assert documents(folder, "*.txt") == [("a[0].txt", "x")], "brackets of the recipe's folder are no pattern"
    assert documents(tmp_path, str(folder / "a[0].txt")) == [(str(folder / "a[0].txt"), "x")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"good \xc3\xa9 then \xff bad", "a.txt: is not UTF-8 at byte 13"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "a.jsonl:2: not UTF-8 at byte 10 of the line"),
        ("a.jsonl", '{"text": "x"}\n\n{"text": \n', "a.jsonl:3: is not JSON"),
        (
            "a.jsonl",
            '{"content": "x", "n": 2}',
            "a.jsonl:1: has no 'text' (its keys are content, n)",
        ),
        ("a.jsonl", '["text"]', "a.jsonl:1: not a JSON object, but list"),
        ("a.jsonl", '{"text": 7}', "a.jsonl:1: 'text' is not a string but int"),
        (
            "a.jsonl",
            '{"text": "\\ud800"}',
            "a.jsonl:1: 'text' is not Unicode text: a lone surrogate at character 0",
        ),
    ],
)
def test_bad_content_is_named(tmp_path, name, content, message):
    write(tmp_path / name, content)
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        documents(tmp_path, name)


def test_bad_sources_are_named(tmp_path):
    write(tmp_path / "folder" / "a.txt", "x")
    write(tmp_path / "a.zip", "x,y")
    (tmp_path / "link.txt").symlink_to(tmp_path / "folder" / "a.txt")
    for sources, message in [
        (["none/*.txt"], "none/*.txt matches no file"),
        (["folder"], "folder is a folder; name its files, as in folder/**/*.txt"),
        (["a.zip"], "a.zip: .zip files cannot be read"),
        (
            ["folder/a.txt", "folder/*.txt"],
            "as folder/a.txt by data source folder/a.txt, and as folder/a.txt by folder/*.txt;",
        ),
        (
            ["folder/a.txt", "link.txt"],
            "read twice: as folder/a.txt by data source folder/a.txt, and as link.txt by link.txt",
        ),
        (["stdlib", "stdlib"], "data source stdlib is given twice; remove one (use weight"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            documents(tmp_path, *sources)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path):
    write(tmp_path / "a.txt", "x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(ValueError, match=r"a\.txt cannot be read: Permission denied"):
        documents(tmp_path, "a.txt")


def test_a_file_that_went_away(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        write(tmp_path / name, "x")
        files = find_files(DataSpec(sources=name), tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=f"{name} cannot be read: No such file"):
            list(read_documents(files))


def test_standard_library():
    names = [file.name for file in find_files(DataSpec(), Path())]
    assert names == sorted(names)
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} < set(names)
    assert not any(re.search(r"/(tests?|site-packages|encodings)/", name) for name in names)
    text = dict(documents(Path(), "stdlib"))["stdlib/argparse.py"]
    assert text == Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes().decode()


def test_python_without_library_source(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(ValueError, match="has no source files of its standard library"):
        documents(tmp_path, "stdlib")


def found(folder: Path, sources: object, exclude: object = ()) -> list[str]:
    data = parse_spec(json.dumps({"sources": sources, "exclude": exclude}), DataSpec)
    return [file.name for file in find_files(data, folder)]


def test_a_glob_counts_each_file_once(tmp_path):
    """Links made it an error that named the same source twice."""
    write(tmp_path / "real" / "b.txt", "b")
    write(tmp_path / "z.txt", "z")
    (tmp_path / "a.txt").symlink_to(tmp_path / "z.txt")
    (tmp_path / "hard.txt").hardlink_to(tmp_path / "z.txt")
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real")
    assert found(tmp_path, "**/*.txt") == ["hard.txt", "real/b.txt"]
    assert found(tmp_path, "folder/*.txt") == ["folder/b.txt"], "a link alone is read"


def test_a_link_to_nothing_is_named(tmp_path):
    write(tmp_path / "a.txt", "a")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "moved.txt")
    with pytest.raises(ValueError, match=r"^gone\.txt: is a link to .*moved\.txt, which does not exist"):
        found(tmp_path, "*.txt")


def test_globs_leave_files_out(tmp_path):
    for name in ("a.txt", "b.txt", "drafts/c.txt", "drafts/old/d.txt", "[x].txt"):
        write(tmp_path / name, name)
    every = found(tmp_path, "**/*.txt")
    assert len(every) == 5
    assert found(tmp_path, "**/*.txt", "drafts/**") == ["[x].txt", "a.txt", "b.txt"]
    assert found(tmp_path, "**/*.txt", ["drafts/*.txt", "[x].txt"]) == ["a.txt", "b.txt", "drafts/old/d.txt"]
    assert len(found(tmp_path, ["stdlib"])) == len(
        found(tmp_path, ["stdlib"], f"{sysconfig.get_path('stdlib')}/json/*.py")
    ) + len(list(Path(sysconfig.get_path("stdlib"), "json").glob("*.py")))
    with pytest.raises(ValueError, match=r"data\.exclude none/\*\* matches no file of data\.sources"):
        found(tmp_path, "**/*.txt", "none/**")
    with pytest.raises(ValueError, match=r"data\.exclude drafts/\*\* matches no file of data\.sources"):
        found(tmp_path, "*.txt", "drafts/**")
    with pytest.raises(ValueError, match=r"leaves out every file of data source a\.txt"):
        found(tmp_path, ["a.txt", "b.txt"], "a*")


def test_tokens_are_left_out_by_either_name(tmp_path):
    for name in ("x.bin", "x.idx", "y.bin", "y.idx"):
        write(tmp_path / name, name)
    assert found(tmp_path, "*.idx", "y.idx") == ["x.idx"]
    assert found(tmp_path, "*.idx", "y.bin") == ["x.idx"]
    assert found(tmp_path, "*.*", "y.*") == ["x.idx"]
    assert found(tmp_path, "*.*", "y.idx") == ["x.idx"]


def test_a_file_that_is_not_text_can_be_left_out_as_its_error_says(tmp_path):
    write(tmp_path / "a.txt", "a")
    write(tmp_path / "old one.txt", b"caf\xe9")
    with pytest.raises(ValueError, match=r"^old one\.txt: is not UTF-8") as error:
        documents(tmp_path, "*.txt")
    (override,) = shlex.split(str(error.value).rpartition(": ")[2])
    assert found(tmp_path, "*.txt", json.loads(override.removeprefix("data.exclude="))) == ["a.txt"]
