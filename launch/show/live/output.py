"""Shows views of a run on a console: as a block that is redrawn, or as a line now and then."""

import time
from collections.abc import Callable, Mapping

from launch.show.live.screen import Screen
from launch.show.live.text import block_lines, log_line
from launch.show.live.view import LiveView
from launch.terminal import Console

LOG_EVERY_S = 10.0  # between two lines
DRAW_EVERY_S = 0.25  # between two frames


class ViewOutput:
    """Decides how and how often; draws nothing by itself."""

    def __init__(
        self, console: Console, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.screen = Screen(console, environment)
        self._clock = clock
        self._shown_at = float("-inf")
        self._shown_step: int | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time for the next view."""
        return self._clock() - self._shown_at >= (DRAW_EVERY_S if self.screen.is_block else LOG_EVERY_S)

    def show(self, view: LiveView) -> None:
        """Draws the view; in a log, each step once."""
        screen = self.screen
        if screen.is_block:
            width = screen.size.columns - 1  # a character in the last column would make some terminals wrap
            screen.draw(block_lines(view, width=width, glyphs=screen.glyphs, has_color=screen.has_color))
        elif view.step == self._shown_step:
            return
        else:
            screen.print_line(log_line(view))
        self._shown_at, self._shown_step = self._clock(), view.step
