"""The Chinese edition: what goes into it, and everything that must make the check fail."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import polib
import pytest

from nanopd.course import translate, translate_docs, translate_notebooks
from nanopd.course.glossary import Term, read_glossary, violations
from nanopd.course.links import links, to_chinese
from nanopd.course.texts import Root, read_notebook
from nanopd.errors import CourseError

GLOSSARY = """# 术语

| English | 中文 | 不用 | 说明 |
|---|---|---|---|
| prefill | 预填充 | 预充填、预载 | 处理提示 |
| decode | 解码 | — | 逐个生成 |
"""
ENGLISH_GLOSSARY = "# Glossary\n\n| English | 中文 | meaning |\n|---|---|---|\n| prefill | 预填充 | the prompt |\n"


def cell(kind: str, cell_id: str, source: str, **more: object) -> dict:
    make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
    return make(source, id=cell_id, **more)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A small checkout whose Chinese edition is complete."""
    for folder in ("notebooks/zh", "nanopd", "docs/en", "docs/zh", "docs/results/card", "csrc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "csrc/k.cu").write_text("// kernel\n")
    (tmp_path / "docs/results/card/step.json").write_text(json.dumps({"values": {"decode_ms": 4.961, "gain": [1.5]}}))
    root = Root(tmp_path)
    output = nbformat.v4.new_output("stream", text="42\n")
    notebook = nbformat.v4.new_notebook(
        cells=[
            cell("markdown", "title", "# Why two phases?\n\n[next](01_paged.ipynb), [kernel](../csrc/k.cu)"),
            cell("code", "measure", "print(42)", outputs=[output], execution_count=1),
            cell(
                "markdown", "result", "A step takes <!--r:card/step.json#decode_ms:.2f-->4.96<!--/r--> ms of prefill."
            ),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
    )
    write_notebook(root, notebook)
    (tmp_path / "README.md").write_text("# nanopd\n\n[中文](README.zh.md) [docs](docs/en/engine.md)\n")
    (tmp_path / "README.zh.md").write_text("# nanopd\n\n[English](README.md) [文档](docs/zh/engine.md)\n")
    (tmp_path / "docs/en/engine.md").write_text("# Engine\n\nSee [glossary](glossary.md).\n\n```python\nx = 1\n```\n")
    (tmp_path / "docs/zh/engine.md").write_text("# 引擎\n\n见[术语](glossary.md)。\n\n```python\nx = 1\n```\n")
    (tmp_path / "docs/en/glossary.md").write_text(ENGLISH_GLOSSARY)
    (tmp_path / "docs/zh/glossary.md").write_text(GLOSSARY)
    translate_docs.stamp(root, [root.chinese(source) for source in root.docs()])
    translate_notebooks.update(root)
    set_translation(root, "title", "# 为什么分两个阶段？\n\n[下一章](01_paged.ipynb)，[核函数](../csrc/k.cu)")
    set_translation(root, "result", "一步预填充需要 <!--r:card/step.json#decode_ms:.2f--><!--/r--> 毫秒。")
    translate_notebooks.build(root)
    assert translate.check(root) == []
    return root


def path_of(root: Root) -> Path:
    return root.path / "notebooks" / "00_why.ipynb"


def write_notebook(root: Root, notebook: object) -> None:
    path_of(root).write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def read(root: Root, chinese: bool = False) -> dict:
    path = root.chinese(path_of(root)) if chinese else path_of(root)
    return read_notebook(path)


def edit(root: Root, cell_id: str, source: str) -> None:
    notebook = read(root)
    next(c for c in notebook.cells if c.id == cell_id).source = source
    write_notebook(root, notebook)


def set_translation(root: Root, cell_id: str, text: str) -> None:
    po = polib.pofile(str(root.po(path_of(root))), wrapwidth=0)
    entry = next(e for e in po if e.msgctxt == cell_id)
    entry.msgstr, entry.flags = text, []
    po.save()


def complaint(root: Root) -> str:
    return "\n".join(translate.check(root))


def test_only_markdown_differs_between_the_editions(root: Root) -> None:
    english, chinese = read(root), read(root, chinese=True)
    assert [c.id for c in english.cells] == [c.id for c in chinese.cells]
    assert english.cells[1] == chinese.cells[1]
    assert english.cells[1].outputs[0].text == "42\n"
    assert chinese.cells[0].source == "# 为什么分两个阶段？\n\n[下一章](01_paged.ipynb)，[核函数](../../csrc/k.cu)"


def test_a_new_measurement_needs_no_new_translation(root: Root) -> None:
    edit(root, "result", "A step takes <!--r:card/step.json#decode_ms:.2f-->3.10<!--/r--> ms of prefill.")
    assert "run build" in complaint(root)
    assert translate_notebooks.update(root) == []
    translate_notebooks.build(root)
    assert complaint(root) == ""
    assert "-->3.10<!--/r-->" in read(root, chinese=True).cells[2].source


def test_a_changed_cell_is_stale_then_fuzzy_and_remembers_what_was_translated(root: Root) -> None:
    edit(root, "title", "# Why three phases?\n\n[next](01_paged.ipynb), [kernel](../csrc/k.cu)")
    assert "'title' is stale" in complaint(root)
    translate_notebooks.update(root)
    assert "'title' is fuzzy" in complaint(root)
    entry = next(e for e in polib.pofile(str(root.po(path_of(root)))) if e.msgctxt == "title")
    assert entry.previous_msgid.startswith("# Why two phases?")
    assert entry.msgstr.startswith("# 为什么分两个阶段")
    set_translation(root, "title", "# 为什么分三个阶段？\n\n[下一章](01_paged.ipynb)，[核函数](../csrc/k.cu)")
    translate_notebooks.update(root)
    translate_notebooks.build(root)
    assert complaint(root) == ""


def test_a_second_change_still_shows_the_text_that_was_translated(root: Root) -> None:
    edit(root, "title", "# Second")
    translate_notebooks.update(root)
    edit(root, "title", "# Third")
    translate_notebooks.update(root)
    entry = next(e for e in polib.pofile(str(root.po(path_of(root)))) if e.msgctxt == "title")
    assert entry.previous_msgid.startswith("# Why two phases?")


def test_a_new_cell_is_missing_until_translated_and_a_deleted_one_goes(root: Root) -> None:
    notebook = read(root)
    notebook.cells.append(cell("markdown", "take-away", "What to remember"))
    del notebook.cells[2]
    write_notebook(root, notebook)
    assert "'take-away' is not translated; run update" in complaint(root)
    assert "'result' has no cell" in complaint(root)
    translate_notebooks.update(root)
    assert "'take-away' is not translated" in complaint(root)
    translate_notebooks.build(root)
    assert read(root, chinese=True).cells[2].source == "What to remember"
    set_translation(root, "take-away", "要记住的")
    translate_notebooks.build(root)
    assert complaint(root) == ""


@pytest.mark.parametrize("what", ["code", "output", "id", "markdown"])
def test_an_edited_chinese_notebook_is_refused(root: Root, what: str) -> None:
    path = root.chinese(path_of(root))
    chinese = read(root, chinese=True)
    if what == "code":
        chinese.cells[1].source = "print(43)"
    elif what == "output":
        chinese.cells[1].outputs[0].text = "43\n"
    elif what == "id":
        chinese.cells[1].id = "other"
    else:
        chinese.cells[0].source += "!"
    path.write_text(nbformat.writes(chinese) + "\n", encoding="utf-8")
    assert "notebooks/zh/00_why.ipynb: differs" in complaint(root)
    path.unlink()
    assert "notebooks/zh/00_why.ipynb: missing" in complaint(root)


def test_changed_english_code_or_outputs_make_the_built_notebook_stale(root: Root) -> None:
    notebook = read(root)
    notebook.cells[1].outputs[0].text = "41\n"
    write_notebook(root, notebook)
    assert "differs" in complaint(root)


def test_a_notebook_without_source_is_refused_and_removed_by_build(root: Root) -> None:
    stray = root.path / "notebooks/zh/07_gone.ipynb"
    stray.write_text("{}")
    assert "07_gone.ipynb: has no English source" in complaint(root)
    assert translate_notebooks.build(root) == [stray]
    assert complaint(root) == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("一步预充填需要 <!--r:card/step.json#decode_ms:.2f--><!--/r--> 毫秒。", "prefill is 预填充"),
        ("一步预填充需要 4.96 毫秒。", "result markers differ"),
        ("见[这里](x.md) <!--r:card/step.json#decode_ms:.2f--><!--/r-->", "links differ"),
        ("A step takes <!--r:card/step.json#decode_ms:.2f--><!--/r--> ms of prefill.", ""),
    ],
)
def test_what_a_translation_may_not_do(root: Root, text: str, says: str) -> None:
    set_translation(root, "result", text)
    translate_notebooks.build(root)
    assert says in complaint(root)
    assert bool(complaint(root)) == bool(says)  # a short sentence that stays English is allowed (a formula, a name)


def test_docs_pairs(root: Root) -> None:
    english, chinese = root.path / "docs/en/engine.md", root.path / "docs/zh/engine.md"
    english.write_text(english.read_text() + "\nOne more sentence.\n")
    assert "docs/zh/engine.md: stale" in complaint(root)
    assert translate_docs.stamp(root, [chinese]) == [chinese]
    assert complaint(root) == ""
    chinese.write_text(chinese.read_text().replace("x = 1", "x = 2"))
    assert "code blocks differ" in complaint(root)
    chinese.write_text(chinese.read_text().replace("x = 2", "x = 1") + "\n## 多余\n")
    assert "headings differ" in complaint(root)
    chinese.unlink()
    assert "docs/zh/engine.md: missing" in complaint(root)


def test_docs_links(root: Root) -> None:
    chinese = root.path / "docs/zh/engine.md"
    text = chinese.read_text()
    chinese.write_text(text.replace("(glossary.md)", "(../en/glossary.md)"))
    assert "links differ: missing ['glossary.md'], added ['../en/glossary.md']" in complaint(root)
    chinese.write_text(text)
    (root.path / "README.md").write_text((root.path / "README.md").read_text() + "[x](docs/en/none.md)\n")
    assert "README.md: link to docs/en/none.md, which does not exist" in complaint(root)


def test_readme_and_stray_chapters(root: Root) -> None:
    readme = root.path / "README.zh.md"
    assert readme.read_text().startswith("<!-- source: README.md sha256: ")
    readme.write_text(readme.read_text().split("\n", 1)[1])
    assert "README.zh.md: stale" in complaint(root)
    translate_docs.stamp(root, [readme])
    translate_docs.stamp(root, [readme])
    assert readme.read_text().count("sha256") == 1
    (root.path / "docs/zh/extra.md").write_text("# 多余\n")
    assert "docs/zh/extra.md: has no English source" in complaint(root)
    with pytest.raises(CourseError, match="say which files"):
        translate_docs.stamp(root, [])
    with pytest.raises(CourseError, match="not a Chinese chapter"):
        translate_docs.stamp(root, [root.path / "docs/zh/extra.md"])


def test_front_matter_of_the_translator_stays(root: Root) -> None:
    chinese = root.path / "docs/zh/engine.md"
    chinese.write_text("---\ntitle: 引擎\n---\n# 引擎\n\n见[术语](glossary.md)。\n\n```python\nx = 1\n```\n")
    translate_docs.stamp(root, [chinese])
    assert "title: 引擎\n---\n# 引擎" in chinese.read_text()
    assert complaint(root) == ""


def test_links_of_the_chinese_edition(root: Root) -> None:
    text = "[a](../docs/en/engine.md#kv) ![p](img/p.png) [b](../README.md) [c](https://x.org/a.md) `[d](e.md)` [f](#g)"
    assert to_chinese(text, path_of(root), root) == (
        "[a](../../docs/zh/engine.md) ![p](../img/p.png) [b](../../README.zh.md) "
        "[c](https://x.org/a.md) `[d](e.md)` [f](#g)"
    )
    assert to_chinese("[中文](zh/00_why.ipynb)", path_of(root), root) == "[中文](../00_why.ipynb)"
    assert links("```\n[a](b.md)\n```\n<img src='c.png'>\n\n[r]: d.md\n") == ["c.png", "d.md"]


def test_glossary(root: Root) -> None:
    assert read_glossary(root)[0] == Term("prefill", "预填充", ("预充填", "预载"))
    assert violations("先预载提示", read_glossary(root)) == ["prefill is 预填充 in the glossary, not 预载"]
    assert violations("先 `预载` 提示，再解码", read_glossary(root)) == []


def test_command_line(root: Root, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(root.path / "docs")
    assert translate.main(["check"]) == 0
    edit(root, "title", "# Changed")
    assert translate.main(["check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert translate.main(["update"]) == 0
    assert "update: locales/zh/00_why.po" in capsys.readouterr().out
    assert translate.main(["stamp"]) == 1
    assert translate.main(["publish"]) == 2


NO_NOTEBOOKS = (
    b"", b"{", b"[]", b"null", b"3", b"\xff", b'{"cells":3,"nbformat":4,"nbformat_minor":5,"metadata":{}}',
    b'{"cells":[{"cell_type":"markdown"}],"nbformat":4,"nbformat_minor":5,"metadata":{}}', b'{"nbformat":3}',
)  # fmt: skip


@pytest.mark.parametrize("content", NO_NOTEBOOKS)
def test_a_file_that_is_no_notebook_is_named(root: Root, content: bytes) -> None:
    path_of(root).write_bytes(content)
    for act in (translate.check, translate_notebooks.update, translate_notebooks.build):
        with pytest.raises(CourseError, match=r"00_why\.ipynb"):
            act(root)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"junk", b'msgctxt "x"\nmsgctxt "y"\nmsgid "a"\nmsgstr "b"'])
def test_a_damaged_po_file_is_named_and_left_alone(root: Root, content: bytes) -> None:
    path = root.po(path_of(root))
    path.write_bytes(content)
    for act in (translate.check, translate_notebooks.update, translate_notebooks.build):
        with pytest.raises(CourseError, match=r"00_why\.po"):
            act(root)
    assert path.read_bytes() == content


def test_a_damaged_built_notebook_is_built_again(root: Root) -> None:
    built = root.chinese(path_of(root))
    good = built.read_bytes()
    built.write_bytes(b"\xff")
    assert "run build" in complaint(root)
    assert translate_notebooks.build(root) == [built]
    assert built.read_bytes() == good


def test_a_text_that_is_not_utf8_is_named(root: Root) -> None:
    english = next(path for path in root.docs() if path.is_file())
    english.write_bytes(b"\xff\xfe")
    with pytest.raises(CourseError, match=english.name):
        translate.check(root)
