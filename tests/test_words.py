"""Names, docstrings, comments, messages and pages use the field's terms, not the private words of early versions."""

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("trainer", "launch", "slurm", "docs", "README.md", "CONTRIBUTING.md")
# Of a program, a file or a figure: it reports, states, requests, returns, selects, uses, retains, removes.
WORDS = (
    "told|tell|tells|says|said|asked|asks|answers?|words|takes|kept|gone|grown|nobody|somebody|stranger|whoever|engaged|"
    "engagement|census|skeleton|witness|sink|holders?|situation|recipes?|rungs?|leave|beside|drawn"
)
PATTERN = re.compile(rf"(?<![A-Za-z])({WORDS})(?![A-Za-z])", re.IGNORECASE)
# Where a word is right: words, files, and what the line has.
RIGHT = (
    # The model's and the assistant's answers to prompts.
    ("answer answers", "trainer/runtime/data/*", ""),
    ("answer answers", "trainer/runtime/tools/chat.py", ""),
    ("answer answers", "trainer/runtime/export/folder.py", ""),
    ("answer answers", "*", "chosen|better one|question"),
    ("answer answers", "docs/*", "(?i)answers?( |$|[.,:;'s)|}])"),
    # FP8 recipes, as Transformer Engine and torchao call them.
    ("recipe recipes", "*fp8*", ""),
    ("recipe recipes", "*",
     r"(?i)fp8|recipe_needs_|_RECIPES|mxfp8|recipe_class|torchtune's recipe|given recipe|by block"),
    ("recipe recipes", "docs/support-matrix.md", "<!-- "),
    # Fields of files and of options, which keep their names.
    ("recipe", "trainer/planning/cases.py", ""),
    ("recipe", "docs/memory-model.md", "`recipe`"),
    ("recipe recipes", "launch/plan/*", ""),
    ("rung rungs", "launch/run/ladder.py", r"""["']rung["']"""),
    ("rung rungs", "*", "--rungs|options.rungs"),
    ("words", "*", r'"words"|run_dir, state, words|break_long_words'),
    ("kept holders engaged answer answers", "*", r'name="|"answers": \[|RETAINED = "kept"'),
    ("takes", "*", "bitsandbytes_takes_plain_tensors|nvme_takes_fp32_partitions"),
    # English: durations and sizes, what is plotted, what is given up.
    ("takes", "*",
     r"takes (a |about |at most |less |longer|seconds|some |too |up to |\d|\{|duration)|step (usually )?takes"),
    ("drawn", "launch/show/*", ""),
    ("drawn", "trainer/planning/page/*", ""),
    ("kept", "docs/walkthrough.md", "in 64 bits"),
    ("kept told", "docs/promises.md", "`tests/"),
    ("leave", "docs/strategies.md", "leave (room|one row)"),
    ("tell", "*", r"\.tell\(\)"),
)  # fmt: skip


def is_right(path: str, line: str, word: str) -> bool:
    return any(word in words.split() and fnmatch(path, files) and re.search(text, line) for words, files, text in RIGHT)


def test_code_and_pages_use_the_words_of_the_field():
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.split() if path.endswith((".py", ".md", ".sh"))]
    assert len(paths) > 100
    found = [
        f"{path}:{number}: {word}: {line.strip()}"
        for path in paths
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        for word in map(str.lower, PATTERN.findall(line))
        if not is_right(path, line, word)
    ]
    assert not found, "\n".join(found)
