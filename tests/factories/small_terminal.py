"""A terminal of a few lines of code: what a person would see after everything that was written to it."""

import io
import re

_PARTS = re.compile(r"(\x1b\[([?\d;]*)([A-Za-z]))|([\s\S])")  # an escape sequence, or a character


class SmallTerminal:
    """Lines as they stand, with the colours left out."""

    def __init__(self, columns: int = 80) -> None:
        self.columns = columns
        self._lines = [""]
        self._row = self._column = 0

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._lines]

    def write(self, text: str) -> None:
        for sequence, number, name, character in _PARTS.findall(text):
            if sequence:
                self._obey(name, number)
            else:
                self._put(character)

    def _obey(self, name: str, number: str) -> None:
        if name == "A":
            assert self._row >= int(number or 1), "the cursor would leave the top"
            self._row -= int(number or 1)
        elif name == "K":
            assert number == "2"
            self._lines[self._row] = ""
        else:
            assert name == "m" or (number == "?25" and name in "lh"), f"what is {number}{name}?"

    def _put(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\n":
            self._row, self._column = self._row + 1, 0  # a terminal in cooked mode returns the carriage as well
            if self._row == len(self._lines):
                self._lines.append("")
        else:
            assert character.isprintable(), repr(character)
            line = self._lines[self._row].ljust(self._column)
            self._lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1
            assert self._column < self.columns, f"the line is too wide: {self._lines[self._row]}"


class TerminalStream(io.StringIO):
    """A stream that claims to be a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True
