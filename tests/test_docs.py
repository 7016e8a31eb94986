"""The pages run. A page's Python blocks make one program, and what each of them prints is what the page shows.

On a page, a `text` block is the output of the `python` block before it; a `python` block without one prints nothing.
Fences without a language are diagrams and are not looked at.
"""

import contextlib
import io
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "pages").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def examples(text):
    """The page's examples in order: pairs of a `python` block and the output that is shown for it."""
    found = []
    for language, body in FENCE.findall(text):
        if language == "python":
            found.append((body, None))
        elif language == "text":
            assert found and found[-1][1] is None, f"this output follows no example:\n{body}"
            found[-1] = (found[-1][0], body.strip())
    return [(code, output or "") for code, output in found]


def run(name, text):
    """Run a page as the program that its blocks make, one blank line between them, and yield per block what is compared.

    Args:
        name: The program's name, without `.py`: the page shows it where Morphax names a rule's file and line.
        text: The page.

    Yields:
        Line number, printed output, shown output.
    """
    module = types.ModuleType(name)
    line = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)
        for code, shown in examples(text):
            program = compile("\n" * (line - 1) + code, f"{name}.py", "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(program, module.__dict__)
            yield line, printed.getvalue().strip(), shown
            line += code.count("\n") + 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_prints_what_it_shows(page):
    """Each block, in order, in one namespace."""
    for line, printed, shown in run(page.stem.lower().replace("-", "_"), page.read_text(encoding="utf-8")):
        assert printed == shown, f"{page.name}: the block at line {line} of its program"


def test_a_page_that_shows_another_output_is_caught():
    """Wrong output, missing output, and output that belongs to nothing."""
    page = "```python\nx = 1\nprint(x)\n```\n\n```text\n{}\n```\n"
    assert list(run("page", page.format("1"))) == [(1, "1", "1")]
    assert list(run("page", page.format("2"))) == [(1, "1", "2")]
    assert list(run("page", "```python\nprint(1)\n```\n")) == [(1, "1", "")]
    with pytest.raises(AssertionError, match="follows no example"):
        list(run("page", "```text\n1\n```\n"))


def test_blocks_share_names_and_lines():
    """A rule's line is that of the program which the blocks make."""
    page = "```python\ndef f():\n    pass\n```\n\n```python\nprint(f.__code__.co_firstlineno)\ndef g(): pass\n```\n\n"
    page += "```python\nprint(g.__code__.co_firstlineno, g.__code__.co_filename)\n```\n"
    assert [(line, printed) for line, printed, _ in run("page", page)] == [(1, ""), (4, "1"), (7, "5 page.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Links to other files of the repository; those to the web are not followed."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


def test_the_readme_gives_two_commands():
    """One line each, and the files that they name exist."""
    commands = [
        body for language, body in FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")) if language == "bash"
    ]
    assert [body.count("\n") for body in commands] == [1, 1]
    scripts = [word for body in commands for word in body.split() if word.endswith(".py")]
    assert scripts and all((ROOT / script).exists() for script in scripts)
